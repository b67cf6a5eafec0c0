"""Facts in their order, at random places among consecutive sentences of a text."""

from __future__ import annotations

import random
import re

END = re.compile(r"(?<=[.!?])[\"'”’]*\s+")


def sentences_in(text: str) -> list[str]:
    """The sentences of a text, their spaces single."""
    found = (" ".join(sentence.split()) for sentence in END.split(text))
    return [sentence for sentence in found if sentence]


def scattered(facts: list[str], sentences: list[str], words: int, draw: random.Random) -> str:
    """``words`` words at most, but for the facts, which all stand there."""
    left = words - sum(len(fact.split()) for fact in facts)
    around = passage(sentences, left, draw) if left > 0 else []
    places = sorted(draw.randint(0, len(around)) for _ in facts)
    parts: list[str] = []
    for start, end, fact in zip([0, *places], [*places, len(around)], [*facts, ""], strict=True):
        parts += [*around[start:end], fact]
    return " ".join(filter(None, parts))


def passage(sentences: list[str], words: int, draw: random.Random) -> list[str]:
    """Sentences of at most ``words`` words from a random place, around the text's end."""
    start, found, left = draw.randrange(len(sentences)), [], words
    for number in range(len(sentences)):
        sentence = sentences[(start + number) % len(sentences)]
        left -= len(sentence.split())
        if left < 0:
            break
        found.append(sentence)
    return found
