"""Reads bAbI: numbered facts, with questions among them that name their supporting facts."""

from __future__ import annotations

import random
import re
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


class Cast(NamedTuple):
    """Who and what stories tell of, that may trade names without making them false."""

    people: list[str]  # the words that facts begin with
    answers: list[str]  # none, where some answer is not told by a fact: yes and no, numbers, lists


def cast_of(told: list[Story]) -> Cast:
    """Of a task."""
    people = {fact.split()[0] for story in told for fact in story.facts} - {"The"}
    words = {word for story in told for fact in story.facts for word in re.findall(r"\w+", fact)}
    answers = {story.answer for story in told}
    return Cast(sorted(people), sorted(answers - people) if answers <= words else [])


def swapped(cast: Cast, story: Story, draw: random.Random) -> Story:
    """A story whose people have traded names, and whose answers have traded theirs: true as before, never told."""
    taken = {old: new for names in cast for old, new in zip(names, draw.sample(names, len(names)), strict=True)}

    def renamed(text: str) -> str:
        return re.sub(r"\w+", lambda word: taken.get(word[0], word[0]), text)

    facts = tuple(map(renamed, story.facts))
    return Story(facts, renamed(story.question), renamed(story.answer), story.supporting)


def task_file(folder: Path, task: int, split: str) -> Path:
    """The file of a task; UserError where there is none."""
    found = sorted(folder.glob(f"qa{task}_*_{split}.txt"))
    if len(found) != 1:
        raise UserError(f"{folder} holds no single qa{task}_*_{split}.txt: set questions.babi to a folder of bAbI's tasks")
    return found[0]
