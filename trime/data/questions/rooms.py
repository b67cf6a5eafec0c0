"""Questions about who is where: facts scattered over a long text, where one fact answers; and passages to hide facts in."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

from trime.common.urls import local_copy
from trime.data.datasets.base import lines_of
from trime.data.datasets.folder import Folder
from trime.data.questions.base import Example
from trime.data.tokenizers import Whitespace
from trime.errors import UserError

END = re.compile(r"(?<=[.!?])[\"'”’]*\s+")  # of a sentence
PEOPLE = ("Ada", "Boris", "Chloe", "Dinah", "Emil", "Farah")
ROOMS = ("attic", "cellar", "library", "studio", "stable", "workshop")
MOVES = ("walked to", "ran to", "went back to", "hurried to")
TALES = {"train": 1000, "valid": 200, "test": 200}


class Rooms:
    """Built-in questions about who is where, hidden in the text of Python's help, in the form of bAbI's first task.

    ``count`` stories of 2 to 8 moves; contexts of ``min_words`` to ``words`` words (None: exactly ``words``).
    """

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
            words = draw_words(self.words, self.min_words, rng)
            yield Example(f"{split}-{number}", f"Where is {person}?", scatter_facts(facts, prose(), words, rng), (room,))

    def fingerprint(self, split: str) -> str:
        return ""


def draw_words(words: int, min_words: int | None, rng: random.Random) -> int:
    """Return the length of a context: drawn from ``min_words`` to ``words`` words, or exactly ``words``."""
    return words if min_words is None else rng.randint(min_words, words)


def scatter_facts(facts: list[str], sentences: list[str], words: int, rng: random.Random) -> str:
    """Return a text of at most ``words`` words with all facts in it; it is longer only where the facts alone are."""
    remaining = words - sum(len(fact.split()) for fact in facts)
    background = random_passage(sentences, remaining, rng) if remaining > 0 else []
    places = sorted(rng.randint(0, len(background)) for _ in facts)
    return " ".join(insert_facts(facts, places, background))


def place_facts(facts: list[str], depths: list[float], background: list[str]) -> tuple[str, list[float]]:
    """Return a text with each fact before the sentence nearest to its depth, in words from 0 to 1, and their depths there."""
    begins = [0, *accumulate(len(sentence.split()) for sentence in background)]
    places = [min(range(len(begins)), key=lambda number: abs(begins[number] - depth * begins[-1])) for depth in depths]
    return " ".join(insert_facts(facts, places, background)), [begins[place] / max(begins[-1], 1) for place in places]


def insert_facts(facts: list[str], places: list[int], sentences: list[str]) -> Iterator[str]:
    """Yield sentences with each fact before the sentence of its place."""
    for number in range(len(sentences) + 1):
        yield from (fact for fact, place in zip(facts, places, strict=True) if place == number)
        yield from sentences[number : number + 1]


def random_passage(sentences: list[str], words: int, rng: random.Random) -> list[str]:
    """Return consecutive sentences of at most ``words`` words from a random start, continuing from the text's beginning."""
    start, passage, remaining = rng.randrange(len(sentences)), [], words
    for number in range(len(sentences)):
        sentence = sentences[(start + number) % len(sentences)]
        remaining -= len(sentence.split())
        if remaining < 0:
            break
        passage.append(sentence)
    return passage


def open_background(folder: str | None) -> Folder:
    if folder is None or not local_copy(folder).is_dir():
        raise UserError(f"questions.background={folder}: name a folder of novels or other text")
    return Folder(folder, Whitespace(), "questions.background")


def sentences_of_novel(background: Folder, split: str, rng: random.Random) -> list[str]:
    """Return the sentences of one of a split's files; UserError where there is no file, or no sentence in it."""
    files = background.files(split)
    if not files:
        raise UserError(f"questions.background={background.location} holds no text for {split}")
    return sentences_of(rng.choice(files))


@cache
def sentences_of(path: Path) -> list[str]:
    """Return the sentences of a text file; UserError where there are none."""
    sentences = split_sentences(b"".join(lines_of(path)).decode("utf-8", "replace"))
    if not sentences:
        raise UserError(f"{path} holds no sentence: remove it or put text into it")
    return sentences


@cache
def prose() -> list[str]:
    from pydoc_data.topics import topics

    return split_sentences("\n".join(topics[name] for name in sorted(topics)))


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, with single spaces."""
    return [" ".join(sentence.split()) for sentence in END.split(text) if sentence.strip()]
