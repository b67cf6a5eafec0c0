"""Tokens of a text with their probabilities and sources, as reports and pages show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from trime.decoding.generation import AttributedToken, agreeing_entries, top_attention, top_entries

BLANKS = {"\n": "↵\n", " ": "␣", "": "·"}  # shown for a token of white space, or of a few bytes of a character


class GeneratedToken(NamedTuple):
    """A token with its probability, the parts of that by source, and the entries that contributed most.

    ``agreeing`` is the number of each memory's entries that hold the token, and of all its entries.
    """

    text: str
    probability: float
    parts: dict[str, float]
    entries: list[dict[str, Any]]
    agreeing: dict[str, tuple[int, int]] | None = None


def describe_step(
    step: AttributedToken, count: int, text: Callable[[list[int]], str], locate: Callable[[str, int], tuple[str, str]]
) -> GeneratedToken:
    """Return the token of a step with the parts of its probability and at most ``count`` entries of each kind.

    ``text`` returns tokens as text, ``locate`` text and place of a memory's entry, given its number.
    """
    parts = {name: float(part[step.token]) for name, part in step.attribution.parts.items()}
    top = [*top_entries(step, count), *top_attention(step, count)] if count else []
    entries = []
    for memory, share, number in top:
        words, place = locate(memory, number)
        entries.append({"memory": memory, "share": share, "text": " ".join(words.split()), "place": place})
    probability = float(step.attribution.probability[step.token])
    return GeneratedToken(text([step.token]), probability, parts, entries, agreeing_entries(step) if count else None)


def annotate(tokens: Iterable[GeneratedToken], texts: Iterable[str], before: str) -> list[dict[str, Any]]:
    """Return each token of a passage as reports show it.

    ``texts`` are the whole text after each token, with the text before the passage, ``before``.
    """
    annotated: list[dict[str, Any]] = []
    shown = before
    for token, text in zip(tokens, texts, strict=True):
        new, shown = extend_shown(shown, text)
        if annotated and annotated[-1]["shown"] in BLANKS.values():  # the white space was shown by its mark already
            new = new.lstrip()
        mark = next((mark for blank, mark in BLANKS.items() if blank in token.text), "·")
        annotated.append(token._asdict() | {"shown": new or mark})
    return annotated


def extend_shown(shown: str, text: str) -> tuple[str, str]:
    """Return the characters to print after ``shown`` so that it grows into ``text``, and all that is shown then.

    White space at the end waits, because punctuation may remove it; so does a character while some of its bytes are missing.
    """
    # A tokenizer writes some marks without the blank before them, and a character byte by byte.
    complete = text.rstrip().removesuffix("\N{REPLACEMENT CHARACTER}")
    return complete[in_common(shown, complete) :], complete


def in_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of characters, or of tokens, with which two texts begin alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
