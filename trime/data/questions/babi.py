"""Reads bAbI: numbered facts, with questions among them that name their supporting facts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trime.types import UserError


class Story(NamedTuple):
    """The facts before a question, its answer, and which facts support it."""

    facts: tuple[str, ...]
    question: str
    answer: str
    supporting: tuple[int, ...]


def stories(path: Path) -> Iterator[Story]:
    """Every question of a file, with the facts told before it."""
    facts: dict[int, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        number, _, told = line.strip().partition(" ")
        if not number.isdigit():
            raise UserError(f"{path} is no bAbI file: its lines begin with a number, not as {line[:40]!r}")
        facts = {} if number == "1" else facts
        question, *rest = (part.strip() for part in told.split("\t"))
        if not rest:
            facts[int(number)] = question
            continue
        order = {fact: place for place, fact in enumerate(facts)}
        supporting = tuple(order[int(one)] for one in " ".join(rest[1:]).split())
        yield Story(tuple(facts.values()), question, rest[0], supporting)


def task_file(folder: Path, task: int, split: str) -> Path:
    """The file of a task; UserError where there is none."""
    found = sorted(folder.glob(f"qa{task}_*_{split}.txt"))
    if len(found) != 1:
        raise UserError(f"{folder} holds no single qa{task}_*_{split}.txt: set questions.babi to a folder of bAbI's tasks")
    return found[0]
