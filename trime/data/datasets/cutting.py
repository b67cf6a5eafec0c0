"""Where a single text is cut into train, valid and test."""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

WORD = re.compile(rb"(?<=\s)\S")
CHARACTER = re.compile(rb"(?<!^)[^\x80-\xbf\s]")  # the first byte of one in UTF-8
SHORT = 10_000  # bytes of a text that is not cut within its lines if it has three


class Cut(NamedTuple):
    """The first byte of each split's part of a text and the one after its last, and whether parts may end within lines."""

    parts: dict[str, tuple[int, int]]
    within_lines: bool


def cut_text(lines: list[bytes], ratio: float) -> Cut | None:
    """Cut a text into train, valid and test, the latter two with ``ratio`` of its bytes each; None if it is too short.

    It is cut between paragraphs, or between lines if there are no blank ones. One line, or lines so long that train would get
    less than half its share, are cut between words, or between characters where there are no words.
    """
    size, ends = sum(map(len, lines)), [*accumulate(map(len, lines))]
    after_blank = [ends[n - 1] for n in range(1, len(lines)) if lines[n].strip() and not lines[n - 1].strip()]
    between_lines = after_blank if len(after_blank) > 1 else ends[:-1]
    if parts := cut_at(between_lines, size, ratio):
        return Cut(parts, False)
    text = b"".join(lines)
    for pattern in (WORD, CHARACTER):
        if parts := cut_at([match.start() for match in pattern.finditer(text)], size, ratio):
            return Cut(parts, True)
    return None


def cut_at(places: list[int], size: int, ratio: float) -> dict[str, tuple[int, int]] | None:
    """Cut a text of ``size`` bytes at two of some places; None if there are too few of them."""
    if len(places) < 2:
        return None
    valid = min(max(bisect_right(places, (1 - 2 * ratio) * size) - 1, 0), len(places) - 2)
    test = max(bisect_right(places, (1 - ratio) * size) - 1, valid + 1)
    if places[valid] < (1 - 2 * ratio) / 2 * size and size > SHORT:
        return None
    return {"train": (0, places[valid]), "valid": (places[valid], places[test]), "test": (places[test], size)}
