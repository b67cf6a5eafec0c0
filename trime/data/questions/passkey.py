"""A number hidden in a long text and asked for afterwards (Mohtashami and Jaggi 2023): does a model find what it has read?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import ClassVar

from trime.data.questions.base import Example
from trime.data.questions.rooms import prose
from trime.data.questions.scatter import context_words, open_background, place_fact, random_passage, sentences_of_novel
from trime.errors import UserError

NAMES = ("Ada", "Boris", "Chloe", "Dinah", "Emil", "Farah", "Greta", "Hugo", "Irene", "Jonas", "Klara", "Lionel")

COUNTS = {"train": 1000, "valid": 100, "test": 100}


class Passkey:
    """``count`` texts of ``least`` to ``words`` words (None: exactly ``words``) that hold ``keys`` numbers of five digits.

    One of them is asked for, by a name if there are several; it stands at ``depth``, from 0 to 1 (None: drawn anew for each
    question). ``background`` is a folder of text, in the form of a folder dataset; None: the text of Python's help.
    """

    name = "passkey"
    splits: ClassVar[tuple[str, ...]] = tuple(COUNTS)

    def __init__(
        self,
        words: int,
        least: int | None = None,
        depth: float | None = None,
        keys: int = 1,
        background: str | None = None,
        count: int | None = None,
        seed: int = 0,
    ):
        if (
            words < 0
            or not (depth is None or 0 <= depth <= 1)
            or not 1 <= keys <= len(NAMES)
            or (count is not None and count < 1)
        ):
            rules = f"0 words or more, a depth in [0, 1] or null, 1 to {len(NAMES)} keys, and a count of 1 or more, or null"
            raise UserError(f"questions: words={words}, depth={depth}, keys={keys}, count={count} must be {rules}")
        self.words, self.least, self.depth, self.keys, self.count, self.seed = words, least, depth, keys, count, seed
        self.background = None if background is None else open_background(background)

    def examples(self, split: str, draw: int = 0) -> Iterator[Example]:
        """Yield the questions of a split; number and text of each depend on its own number, not on the depth."""
        for number in range(self.count or COUNTS[split]):
            rng = random.Random(f"{self.seed} {draw} {split} {number}")
            names, numbers = rng.sample(NAMES, self.keys), rng.sample(range(10000, 100000), self.keys)
            drawn, words = rng.random(), context_words(self.words, self.least, rng)
            whose = [f" of {name}" for name in names] if self.keys > 1 else [""]
            facts = [f"The pass key{of} is {key}. Remember it." for of, key in zip(whose, numbers, strict=True)]
            sentences = sentences_of_novel(self.background, split, rng) if self.background else prose()
            passage = random_passage(sentences, words - sum(len(fact.split()) for fact in facts), rng)
            depth = drawn if self.depth is None else self.depth
            context, depth = place_fact(facts[0], facts[1:], passage, depth, rng)
            question = f"What is the pass key{whose[0]}?"
            yield Example(f"{split}-{number}", question, context, (str(numbers[0]),), round(depth, 4))
