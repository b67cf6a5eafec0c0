"""The built-in questions: who is where, within the text of Python's help. No download; in the form of bAbI's first task."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import ClassVar

from trime.data.questions.base import Example
from trime.data.questions.scatter import context_words, scatter_facts, split_sentences
from trime.errors import UserError

PEOPLE = ("Ada", "Boris", "Chloe", "Dinah", "Emil", "Farah")
ROOMS = ("attic", "cellar", "library", "studio", "stable", "workshop")
MOVES = ("walked to", "ran to", "went back to", "hurried to")
TALES = {"train": 1000, "valid": 200, "test": 200}


class Rooms:
    """``count`` stories of 2 to 8 moves; contexts of ``min_words`` to ``words`` words (None: exactly ``words``)."""

    name = "rooms"
    splits: ClassVar[tuple[str, ...]] = tuple(TALES)

    def __init__(self, words: int, min_words: int | None = None, count: int | None = None, seed: int = 0):
        if words < 0:
            raise UserError(f"questions.words={words}: a context has 0 words or more")
        self.words, self.min_words, self.count, self.seed = words, min_words, count, seed

    def examples(self, split: str, draw: int = 0) -> Iterator[Example]:
        """Yield the stories of a split, which occur in another split only by chance."""
        for number in range(self.count or TALES[split]):
            rng = random.Random(f"{self.seed} {draw} {split} {number}")
            moves = [(rng.choice(PEOPLE), rng.choice(ROOMS)) for _ in range(rng.randint(2, 8))]
            person = rng.choice(moves)[0]
            room = dict(moves)[person]
            facts = [f"{mover} {rng.choice(MOVES)} the {place}." for mover, place in moves]
            words = context_words(self.words, self.min_words, rng)
            yield Example(f"{split}-{number}", f"Where is {person}?", scatter_facts(facts, prose(), words, rng), (room,))

    def fingerprint(self, split: str) -> str:
        return ""


@cache
def prose() -> list[str]:
    """Return the sentences of Python's help texts."""
    from pydoc_data.topics import topics

    return split_sentences("\n".join(topics[name] for name in sorted(topics)))
