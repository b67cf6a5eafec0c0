"""Scatter facts, in their order, at random places among consecutive sentences of a text."""

from __future__ import annotations

import random
import re

END = re.compile(r"(?<=[.!?])[\"'”’]*\s+")


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
