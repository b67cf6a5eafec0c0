"""Types of settings with their bounds, and the fields of the schema.

Only the standard library and annotated_types are imported, so that --help answers at once; pydantic reads these types when a
configuration is checked.
"""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen

from trime.common.choices import parse_quantity

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null", list: "a list"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
FILLED = MinLen(1)


@dataclass(frozen=True)
class Coerce:
    """A value is read by ``function`` before its type is checked; a ValueError of it refuses the value. ``words`` say so."""

    function: Callable[[Any], Any]
    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self.function, handler(source))


def read_tokens(value: Any) -> Any:
    """Return a number of tokens that is written as 30k or 1.5M."""
    if isinstance(value, str) or (isinstance(value, float) and value.is_integer()):
        return parse_quantity(value)
    return value


def check_rising(values: Any) -> Any:
    """Return a list; ValueError unless its values rise."""
    if isinstance(values, list) and any(not one < other for one, other in pairwise(values)):
        raise ValueError
    return values


def matching(pattern: str) -> Callable[[Any], Any]:
    """Return a function that returns text which matches a pattern as a whole; ValueError for any other text."""

    def check(text: Any) -> Any:
        if isinstance(text, str) and not re.fullmatch(pattern, text):
            raise ValueError
        return text

    return check


Count = Annotated[int, Ge(1)]
Size = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Dropout = Annotated[float, Ge(0), Lt(1)]
Tokens = Annotated[int, Ge(1), Coerce(read_tokens, " (or as 500, 30k, 1.5M)")]
Folder = Annotated[str, Coerce(matching(r"(?!\w+://).+"), ", a folder of this machine or of a disk that it has mounted")]
Name = Annotated[str, Coerce(matching(r"[^./\0][^/\0]*"), ", a name rather than a path")]
Address = Annotated[str, Coerce(matching(r"auto|.+:.+"), ", auto or HOST:PORT")]
Part = dict[str, Any]  # a component from a file of a group: its ``_target_`` and arguments
RISING = Coerce(check_rising, " from the lowest to the highest")


STRICT: Any = {"strict": True, "extra": "forbid", "allow_inf_nan": False}  # nothing is converted, and other keys are refused


class Section:
    """A section of the schema; its docstring is its line of --help."""

    __pydantic_config__: ClassVar[Any] = STRICT


def setting(default: Any, help: str, free: bool = False) -> Any:
    """Return the field of a setting: its default and its line of --help. ``free``: it cannot change a result."""
    metadata = {"help": help, "free": free}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def free(default: Any, help: str) -> Any:
    """Return the field of a setting that cannot change a result: no artefact depends on it."""
    return setting(default, help, free=True)


def section(kind: type, free: bool = False) -> Any:
    """Return the field of a section; ``free``: none of its settings can change a result."""
    return field(default_factory=kind, metadata={"help": kind.__doc__, "free": free})


def defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of a section, and of those in it, as plain data."""
    values = {each.name: getattr(kind(), each.name) for each in fields(kind)}
    return {name: defaults(type(value)) if is_dataclass(value) else value for name, value in values.items()}


def free_settings(kind: type, place: str = "") -> list[str]:
    """Return the dotted keys of the settings and sections that cannot change a result."""
    keys = []
    for each in fields(kind):
        value = each.default_factory() if callable(each.default_factory) else None
        if each.metadata["free"]:
            keys.append(f"{place}{each.name}")
        elif is_dataclass(value):
            keys += free_settings(type(value), f"{place}{each.name}.")
    return keys


def describe_type(kind: Any) -> str:
    """Describe a type, in words that follow "it must be"."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        rules = inner[1:]
        limits = [f"{word} {getattr(rule, name):g}" for rule in rules for name, word in BOUNDS.items() if hasattr(rule, name)]
        filled = " of at least one value" * any(isinstance(rule, MinLen) for rule in rules)
        words = "".join(rule.words for rule in rules if isinstance(rule, Coerce))
        head, comma, rest = describe_type(inner[0]).partition(",")
        return f"{head}{filled}{' ' * bool(limits)}{' and '.join(limits)}{comma}{rest}{words}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe_type, inner))
    if origin is Literal:
        *first, last = map(str, inner)
        return f"{', '.join(first)} or {last}" if first else last
    if origin is list:
        return f"a list, each {describe_type(inner[0])}" if inner and inner[0] is not Any else "a list"
    if origin is NotRequired:
        return describe_type(inner[0])
    return WORDS.get(origin, "a section, as {KEY: VALUE}")
