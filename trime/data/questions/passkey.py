"""A number hidden in a long text and asked for afterwards (Mohtashami and Jaggi 2023): does a model find what it has read?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, count, islice
from typing import ClassVar

from trime.common.choices import ASKED
from trime.data.questions.base import Example
from trime.data.questions.rooms import draw_words, open_background, place_facts, prose, random_passage, sentences_of_novel
from trime.errors import UserError

NAMES = ("Ada", "Boris", "Chloe", "Dinah", "Emil", "Farah", "Greta", "Hugo", "Irene", "Jonas", "Klara", "Lionel")
COUNTS = {"train": 1000, "valid": 100, "test": 100}


class Passkey:
    """``count`` questions about texts of ``min_words`` to ``words`` words (None: exactly ``words``) that hold ``keys`` numbers.

    Numbers have five digits. One is asked for, by a name if there are several; it lies at ``depth``, from 0 to 1 (None:
    drawn anew for each text). ``ask="all"``: a text has a question for each number; ``depth`` is that of the first, and
    without it the numbers are spread over the text. ``background`` is a folder of text, in the form of a folder dataset;
    None: the text of Python's help.
    """

    name = "passkey"
    splits: ClassVar[tuple[str, ...]] = tuple(COUNTS)

    def __init__(
        self,
        words: int,
        min_words: int | None = None,
        depth: float | None = None,
        keys: int = 1,
        ask: str = "one",
        background: str | None = None,
        count: int | None = None,
        seed: int = 0,
    ):
        if (
            words < 0
            or not (depth is None or 0 <= depth <= 1)
            or not 1 <= keys <= len(NAMES)
            or ask not in ASKED
            or (count is not None and count < 1)
        ):
            rules = f"0 words or more, a depth in [0, 1] or null, 1 to {len(NAMES)} keys, one or all, and a count of 1 or more"
            raise UserError(f"questions: words={words}, depth={depth}, keys={keys}, ask={ask}, count={count} must be {rules}")
        self.words, self.min_words, self.depth, self.keys, self.ask = words, min_words, depth, keys, ask
        self.count, self.seed = count, seed
        self.background = None if background is None else open_background(background)

    def examples(self, split: str, draw: int = 0) -> Iterator[Example]:
        """Yield the questions of a split; numbers and text of each depend on the text's own number, not on the depth."""
        return islice(chain.from_iterable(self.texts(split, draw)), self.count or COUNTS[split])

    def fingerprint(self, split: str) -> str:
        return self.background.fingerprint() if self.background else ""

    def texts(self, split: str, draw: int) -> Iterator[list[Example]]:
        """Yield the questions about each text, without end."""
        for number in count():
            rng = random.Random(f"{self.seed} {draw} {split} {number}")
            names, numbers = rng.sample(NAMES, self.keys), rng.sample(range(10000, 100000), self.keys)
            if self.ask == "all" and self.depth is None:  # spread over the text, in any order
                depths = [(place + rng.random()) / self.keys for place in rng.sample(range(self.keys), self.keys)]
            else:
                drawn = [rng.random() for _ in range(self.keys)]
                depths = drawn if self.depth is None else [self.depth, *drawn[1:]]
            words = draw_words(self.words, self.min_words, rng)
            # Small models take a pass key for a thing, not for a number.
            secrets = [f"{name}'s secret number" for name in names] if self.keys > 1 else ["{} secret number"]
            facts = [f"{secret.format('The')} is {key}. Remember it." for secret, key in zip(secrets, numbers, strict=True)]
            sentences = sentences_of_novel(self.background, split, rng) if self.background else prose()
            passage = random_passage(sentences, words - sum(len(fact.split()) for fact in facts), rng)
            context, depths = place_facts(facts, depths, passage)
            asked = []
            for name, secret, key, depth in zip(names, secrets, numbers, depths, strict=True):
                label = f"{split}-{number} {name}" if self.keys > 1 and self.ask == "all" else f"{split}-{number}"
                asked.append(Example(label, f"What is {secret.format('the')}?", context, (str(key),), round(depth, 4)))
            yield asked if self.ask == "all" else asked[:1]
