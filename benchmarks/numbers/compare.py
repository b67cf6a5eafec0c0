"""Compare printed numbers with values, at the printed precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.numbers.expression import NoValueError, evaluate
from benchmarks.numbers.printed import is_rounded, rounded
from trime.report.bootstrap import Difference


def compare(printed: tuple[str, ...], expression: str, names: dict[str, Any]) -> Iterator[str]:
    """Yield the differences between printed numbers and an expression's; an expression without numbers must be true."""
    try:
        value = evaluate(expression, names)
        if printed:
            yield from (f"{fault}: {expression}" for fault in differing(printed, flat(value)))
        elif value is not True:
            yield f"is not true: {expression}"
    except NoValueError as error:
        yield str(error)


def differing(printed: tuple[str, ...], values: list[float]) -> Iterator[str]:
    """Yield a fault for each printed number that is not its value, rounded."""
    if len(values) != len(printed):
        yield f"prints {', '.join(printed)}, where the source has {len(values)} numbers"
        return
    for text, value in zip(printed, values, strict=True):
        if not is_rounded(text, value):
            yield f"prints {text}, expected {rounded(text, value)}"


def flat(value: Any) -> list[float]:
    """Return the numbers of a value, of a difference also its interval; NoValueError if it is not a number."""
    if isinstance(value, Difference):
        return [value.value, value.low, value.high]
    if isinstance(value, (tuple, list)):
        return [number for part in value for number in flat(part)]
    if not isinstance(value, (int, float)):
        raise NoValueError(f"{value!r} is not a number")
    return [float(value)]
