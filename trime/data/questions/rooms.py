"""The embedded questions: who is where, among the prose of Python's own help. No download; of the form of bAbI's first task."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import ClassVar

from trime.data.questions.base import Example
from trime.data.questions.scatter import scattered, sentences_in
from trime.types import UserError

PEOPLE = ("Ada", "Boris", "Chloe", "Dinah", "Emil", "Farah")
ROOMS = ("attic", "cellar", "library", "studio", "stable", "workshop")
MOVES = ("walked to", "ran to", "went back to", "hurried to")
TALES = {"train": 1000, "valid": 200, "test": 200}


class Rooms:
    """``count`` stories of 2 to 8 moves; contexts have between ``least`` (null: exactly) and ``words`` words."""

    name = "rooms"
    splits: ClassVar[tuple[str, ...]] = tuple(TALES)

    def __init__(self, words: int, least: int | None = None, count: int | None = None, seed: int = 0):
        if words < 0:
            raise UserError(f"questions.words={words}: a context has 0 words or more")
        self.words, self.least, self.count, self.seed = words, least, count, seed

    def examples(self, split: str, draw: int = 0) -> Iterator[Example]:
        """Stories of a split, which share none with another's but by chance."""
        for number in range(self.count or TALES[split]):
            own = random.Random(f"{self.seed} {draw} {split} {number}")
            moves = [(own.choice(PEOPLE), own.choice(ROOMS)) for _ in range(own.randint(2, 8))]
            person = own.choice(moves)[0]
            room = dict(moves)[person]
            facts = [f"{who} {own.choice(MOVES)} the {where}." for who, where in moves]
            words = self.words if self.least is None else own.randint(self.least, self.words)
            yield Example(f"{split}-{number}", f"Where is {person}?", scattered(facts, prose(), words, own), (room,))


@cache
def prose() -> list[str]:
    """The sentences of Python's help texts."""
    from pydoc_data.topics import topics

    return sentences_in("\n".join(topics[name] for name in sorted(topics)))
