"""Find the numbers printed in a text, and compare a printed number with a value."""

from __future__ import annotations

import re
from collections.abc import Iterator

# A sign, digits with or without commas, decimals, thousands or millions; no part of a word, a version or a name.
DIGITS = r"[−+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?[kM]?(?!\w|\.\d|,\d)"
NUMBER = re.compile(rf"(?<![\w.,'’-]){DIGITS}")
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SCALE = {"k": 1e3, "M": 1e6}
OTHER = re.compile(
    r"`[^`]*`"  # code: commands and settings
    r"|\b(?:Eq|Eqs|Table|Tables|Figure|section|footnote|Algorithm|Appendix|Python|NetworkX)\.?\s[\d.]+(?:(?:,|\sto|\sand)\s\d+)*"
    r"|(?:al\.|\b[A-Z]\w+)\s(?:19|20)\d\d\b"  # a reference
    r"|\b(?:19|20)\d\d-\d\d-\d\d(?:\sand\s\d\d)?"  # a date
    r"|\b(?:7M|150M|247M)(?=\b)"  # the papers' models
    r"|\b95\s%"
    r"|^\s*\d+\.\s",  # the number of a list's entry
    re.MULTILINE,
)


def numbers(text: str) -> Iterator[re.Match[str]]:
    """Find the numbers of a text, but those of code, references, dates and the names of the papers' models."""
    shown = OTHER.sub(lambda part: re.sub(r"\S", "_", part[0]), text)
    return NUMBER.finditer(shown)


def quotation(words: str) -> re.Pattern[str]:
    """Return the pattern of words quoted from a page, with a group for each ``{}``: a number, or a number's name."""
    number = rf"(?<![\w.,])({DIGITS}|(?i:{'|'.join(WORDS)})\b)"
    return re.compile(number.join(r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in words.split("{}")))


def parsed(printed: str) -> tuple[float, float]:
    """Return a printed number's value, and the unit of its last digit."""
    if printed.lower() in WORDS:
        return WORDS.index(printed.lower()), 1.0
    scale = SCALE.get(printed[-1], 1.0)
    digits = printed.rstrip("kM").replace(",", "").replace("−", "-")
    return float(digits) * scale, scale * 10.0 ** -len(digits.partition(".")[2])


def is_rounded(printed: str, value: float) -> bool:
    """Return True if a value, rounded to the printed precision, is the printed number."""
    number, unit = parsed(printed)
    return abs(value - number) <= unit / 2 * (1 + 1e-6) + 1e-12


def rounded(printed: str, value: float) -> str:
    """Return a value in the format of a printed number."""
    scale = SCALE.get(printed[-1], 1.0)
    decimals = len(printed.rstrip("kM").partition(".")[2])
    sign = "+" if printed.startswith("+") else ""
    return f"{value / scale:{sign},.{decimals}f}" + (printed[-1] if scale > 1 else "")
