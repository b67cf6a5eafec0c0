"""The format of bAbI: numbered facts, with questions among them that name their supporting facts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trime.data.datasets.base import lines_of
from trime.errors import UserError


class Story(NamedTuple):
    """The facts before a question, its answer, and which facts support it."""

    facts: tuple[str, ...]
    question: str
    answer: str
    supporting: tuple[int, ...]


def stories(path: Path) -> Iterator[Story]:
    """Yield every question of a file with the facts before it; UserError where a line has no number."""
    facts: dict[int, str] = {}
    for line in map(bytes.decode, lines_of(path)):
        number, _, content = line.strip().partition(" ")
        if not number.isdigit():
            raise UserError(f"{path} is not a bAbI file: its lines begin with a number, not like {line[:40]!r}")
        facts = {} if number == "1" else facts
        question, *rest = (part.strip() for part in content.split("\t"))
        if not rest:
            facts[int(number)] = question
            continue
        order = {fact: index for index, fact in enumerate(facts)}
        supporting = tuple(order[int(fact)] for fact in " ".join(rest[1:]).split())
        yield Story(tuple(facts.values()), question, rest[0], supporting)


class Cast(NamedTuple):
    """The names in a task's stories that can be exchanged without making a story false."""

    people: list[str]  # the words that facts begin with
    answers: list[str]  # empty where some answer is not a word of the facts: yes and no, numbers, lists


def cast_of(stories: list[Story]) -> Cast:
    """Return the exchangeable names in the stories of a task."""
    people = {fact.split()[0] for story in stories for fact in story.facts} - {"The"}
    words = {word for story in stories for fact in story.facts for word in re.findall(r"\w+", fact)}
    answers = {story.answer for story in stories}
    return Cast(sorted(people), sorted(answers - people) if answers <= words else [])


def swap_names(cast: Cast, story: Story, rng: random.Random) -> Story:
    """Return the story with the names of people, and those of answers, randomly permuted: new, but as true as before."""
    names = {old: new for group in cast for old, new in zip(group, rng.sample(group, len(group)), strict=True)}

    def rename(text: str) -> str:
        return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)

    facts = tuple(map(rename, story.facts))
    return Story(facts, rename(story.question), rename(story.answer), story.supporting)


def task_file(folder: Path, task: int, split: str) -> Path:
    """Return the file of a task; UserError where there is not exactly one."""
    files = sorted(folder.glob(f"qa{task}_*_{split}.txt"))
    if len(files) != 1:
        raise UserError(f"{folder} holds no single qa{task}_*_{split}.txt: set questions.babi to a folder of bAbI's tasks")
    return files[0]
