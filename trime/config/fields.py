"""Fields of the schema: a default, a help text, and what a value may be beyond its type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from typing import Any

from trime.quantities import parse_quantity


@dataclass(frozen=True)
class Rule:
    """What a value may be: null if it is ``optional``, a ``switch``, one of ``choices``, or a number or quantity within bounds.

    ``many``: a list of such values is meant, or allowed beside a single one. ``words`` are values that count as they are,
    beside numbers: as ``auto``. A ``name`` is text that starts with a letter.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    whole: bool = False
    quantity: bool = False
    optional: bool = False
    switch: bool = False
    filled: bool = False
    rising: bool = False
    many: bool = False
    name: bool = False

    def broken_by(self, value: Any) -> str | None:
        """Return what the value must be where it is not, else None."""
        if (value is None and self.optional) or value in self.words:
            return None
        if isinstance(value, list) and (self.many or not self.demanding):
            return self.broken_by_list(value)
        if self.switch:
            return None if isinstance(value, bool) else self.text
        if self.choices:
            return None if isinstance(value, str) and value in self.choices else self.text
        if self.quantity and isinstance(value, str):
            return None if is_quantity(value) else self.text
        if self.name:
            return None if isinstance(value, str) and value[:1].isalpha() else self.text
        if self.bounded:
            return None if self.holds(value) else self.text
        return None

    def broken_by_list(self, values: list[Any]) -> str | None:
        """Return what a list must be where it is not, else None."""
        if self.filled and not values:
            return f"a list of at least one value, each {self.text}"
        if any(self.broken_by(value) or isinstance(value, list) for value in values):
            return f"a list, each {self.text}"
        if self.rising and values != sorted({*values}):
            return "a list of different values from the lowest to the highest"
        return None

    @property
    def demanding(self) -> bool:
        """Whether any value breaks the rule."""
        return bool(self.switch or self.choices or self.name or self.bounded)

    @property
    def bounded(self) -> bool:
        """Whether a number is wanted."""
        bounds = (self.at_least, self.above, self.at_most, self.below)
        return self.whole or self.quantity or any(bound is not None for bound in bounds)

    def holds(self, value: Any) -> bool:
        """Return True for a finite number within the bounds."""
        if not is_number(value) or not math.isfinite(value) or (self.whole and not isinstance(value, int)):
            return False
        if self.quantity and value != int(value):
            return False
        too_low = (self.at_least is not None and value < self.at_least) or (self.above is not None and value <= self.above)
        too_high = (self.at_most is not None and value > self.at_most) or (self.below is not None and value >= self.below)
        return not (too_low or too_high)

    @property
    def text(self) -> str:
        """What a value must be, to follow "must be"."""
        if self.switch:
            text = "true or false"
        elif self.name:
            text = "text that starts with a letter"
        elif self.choices:
            text = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}" if len(self.choices) > 1 else self.choices[0]
        else:
            bounds = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most), ("below", self.below))
            limits = " and ".join(f"{word} {limit:g}" for word, limit in bounds if limit is not None)
            text = f"a {'whole ' if self.whole else ''}number{' ' * bool(limits)}{limits}"
            text += " (or as 500, 30k, 1.5M)" if self.quantity else ""
        words = [*self.words, *(["null"] if self.optional else [])]
        return " or ".join([text, *words])


def is_number(value: Any) -> bool:
    """Return True for an int or a float; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_quantity(text: str) -> bool:
    """Return True for a number of at least 1, with k, M, G or B behind it or without."""
    try:
        parse_quantity(text)
    except ValueError:
        return False
    return True


def setting(default: Any, help: str, **rule: Any) -> Any:
    """Return a dataclass field with a default, a help text and a rule; lists and dicts are copied for each instance."""
    metadata = {"help": help, "rule": Rule(**rule)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, help: str) -> Any:
    """Return a dataclass field for a section of settings."""
    return field(default_factory=kind, metadata={"help": help})


def help_of(entry: Field[Any]) -> str:
    """Return a field's help text."""
    metadata: Mapping[str, Any] = entry.metadata
    return str(metadata.get("help", ""))
