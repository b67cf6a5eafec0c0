"""How long axes are divided into blocks."""

from __future__ import annotations


def slices(length: int, block: int) -> list[slice]:
    """Return consecutive slices of at most ``block`` elements."""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]
