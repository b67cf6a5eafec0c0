"""Put facts among consecutive sentences of a text: at random places in their order, or one at a depth that is asked for."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import accumulate
from pathlib import Path

from trime.data.datasets.base import lines_of
from trime.data.datasets.folder import Folder
from trime.data.tokenizers import Whitespace
from trime.errors import UserError
from trime.urls import local_copy

END = re.compile(r"(?<=[.!?])[\"'”’]*\s+")


def context_words(words: int, min_words: int | None, rng: random.Random) -> int:
    """Return the length of a context: drawn from ``min_words`` to ``words`` words, or exactly ``words``."""
    return words if min_words is None else rng.randint(min_words, words)


def open_background(folder: str | None) -> Folder:
    """Open ``questions.background``; UserError if it is not a folder."""
    if folder is None or not local_copy(folder).is_dir():
        raise UserError(f"questions.background={folder}: name a folder of novels or other text")
    return Folder(folder, Whitespace(), "questions.background")


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, with single spaces."""
    sentences = (" ".join(sentence.split()) for sentence in END.split(text))
    return [sentence for sentence in sentences if sentence]


def scatter_facts(facts: list[str], sentences: list[str], words: int, rng: random.Random) -> str:
    """Return a text of at most ``words`` words with all facts in it; it is longer only where the facts alone are."""
    remaining = words - sum(len(fact.split()) for fact in facts)
    background = random_passage(sentences, remaining, rng) if remaining > 0 else []
    places = sorted(rng.randint(0, len(background)) for _ in facts)
    parts: list[str] = []
    for start, end, fact in zip([0, *places], [*places, len(background)], [*facts, ""], strict=True):
        parts += [*background[start:end], fact]
    return " ".join(filter(None, parts))


def place_facts(facts: list[str], depths: list[float], background: list[str]) -> tuple[str, list[float]]:
    """Return a text of sentences with each fact before the sentence that begins nearest to its depth, and their depths there.

    Depths are shares of the background's words, 0 at its beginning and 1 at its end.
    """
    begins = [0, *accumulate(len(sentence.split()) for sentence in background)]
    places = [min(range(len(begins)), key=lambda number: abs(begins[number] - depth * begins[-1])) for depth in depths]
    parts: list[str] = []
    for number in range(len(begins)):
        parts += [fact for fact, place in zip(facts, places, strict=True) if place == number]
        parts += background[number : number + 1]
    return " ".join(parts), [begins[place] / max(begins[-1], 1) for place in places]


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


def sentences_of_novel(background: Folder, split: str, rng: random.Random) -> list[str]:
    """Return the sentences of one of a split's files; UserError where there is none."""
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
