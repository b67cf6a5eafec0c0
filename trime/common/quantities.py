"""Numbers of tokens as settings write them (500, 30k, 1.5M), and durations as messages say them."""

from __future__ import annotations

SCALES = {"k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


def duration(seconds: float) -> str:
    """Return a duration as a person would say it, in seconds, minutes, hours or days."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} seconds"


def parse_quantity(value: int | float | str) -> int:
    """Return a number of at least 1, with k, M, G or B behind it or without; ValueError where it is none."""
    text = str(value)
    digits, scale = (text[:-1], SCALES[text[-1]]) if text[-1:] in SCALES else (text, 1)
    try:
        count = int(float(digits) * scale)
    except OverflowError:
        count = 0
    if count < 1:
        raise ValueError(f"{value} is not at least 1")
    return count
