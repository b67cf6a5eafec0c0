"""Tokens with what reports show of each: its text as it continues a line, and where its probability came from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trime.stages.generate import extend_shown
from trime.stages.samples.writers import GeneratedToken

BLANKS = {"\n": "↵\n", " ": "␣", "": "·"}


def annotate(tokens: Iterable[GeneratedToken], texts: Iterable[str], before: str) -> list[dict[str, Any]]:
    """Return each token of a passage as reports show it.

    ``texts`` are the whole text after each token, with what comes before the passage, ``before``.
    """
    annotated: list[dict[str, Any]] = []
    shown = before
    for token, text in zip(tokens, texts, strict=True):
        new, shown = extend_shown(shown, text)
        if annotated and annotated[-1]["shown"] in BLANKS.values():  # the white space was shown by its mark already
            new = new.lstrip()
        annotated.append(token._asdict() | {"shown": new or blank_mark(token.text)})
    return annotated


def blank_mark(text: str) -> str:
    """Return a visible mark for a token that is white space or a part of a character."""
    return next((mark for blank, mark in BLANKS.items() if blank in text), "·")
