"""What the value of a setting may be: a test, and the words that say what it tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from trime.io import plain
from trime.types import UserError


class Kind(NamedTuple):
    """Values for which ``holds``; ``wanted`` completes "it must be"."""

    holds: Callable[[Any], bool]
    wanted: str


def demand(config: DictConfig, kinds: Mapping[str, Kind]) -> None:
    """UserError at the first key whose value is not of its kind; what the configuration lacks is null."""
    for key, kind in kinds.items():
        value = plain(OmegaConf.select(config, key))
        if not kind.holds(value):
            raise UserError(f"{key}={value}: it must be {kind.wanted}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(least: int) -> Kind:
    """A whole number; true and false are none."""
    wanted = "a whole number above 0" if least == 1 else f"a whole number, at least {least}"
    return Kind(lambda value: is_number(value) and isinstance(value, int) and value >= least, wanted)


def one_of(*names: str) -> Kind:
    return Kind(lambda value: value in names, f"{', '.join(names[:-1])} or {names[-1]}")


def optional(kind: Kind, name: str | None = None) -> Kind:
    """The kind, or null, or another name."""
    return Kind(lambda value: value == name or kind.holds(value), f"{kind.wanted}, or {name or 'null'}")


def grid(kind: Kind) -> Kind:
    """A list of at least one value, each of the kind."""
    return Kind(
        lambda value: isinstance(value, list) and bool(value) and all(map(kind.holds, value)),
        f"a list, as [1,2], each {kind.wanted}",
    )


def each(kind: Kind) -> Kind:
    """A value of the kind, or a list of such: one for each layer."""
    found = grid(kind)
    return Kind(lambda value: kind.holds(value) or found.holds(value), f"{kind.wanted}, or a list of such")


NUMBER = Kind(is_number, "a number")
POSITIVE = Kind(lambda value: is_number(value) and value > 0, "a number above 0")
NATURAL = Kind(lambda value: is_number(value) and value >= 0, "a number, at least 0")
SHARE = Kind(lambda value: is_number(value) and 0 < value <= 1, "a share above 0, at most 1")
BOOLEAN = Kind(lambda value: isinstance(value, bool), "true or false")
SOME = whole(1)
