"""How messages and --help name values and types."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from trime.config.fields import Rule

TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}


def written(value: Any) -> str:
    """Return a value as the command line has it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"[{','.join(map(written, value))}]" if isinstance(value, list) else str(value)


def no_setting(key: str, known: Iterable[str]) -> str:
    """Return what to say of a setting that there is not, with the nearest of those that there are."""
    near = difflib.get_close_matches(key, known, 1, cutoff=0.8)
    return f"there is no setting {key}" + (f": is it {near[0]}?" if near else "")


def no_choice(group: str, name: str, choices: list[str]) -> str:
    """Return what to say of a choice that a group does not have: the nearest that it has, or all of them."""
    near = [] if name in choices else difflib.get_close_matches(name, choices, 1, cutoff=0.75)  # it may be another group's
    return f"{group}={name}: is it {near[0]}?" if near else f"{group}={name}: choose from {', '.join(choices)}"


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def wanted(kind: Any, rule: Rule | None = None) -> str:
    """Return what a value of a type, with its rule, must be, to follow "must be"."""
    if rule and (rule.switch or rule.choices or rule.bounded) and get_origin(kind) is not list:
        return rule.text
    if is_dataclass(kind):
        return f"a section: set what stands in it, as {fields(kind)[0].name}"
    return " or ".join(map(name_of_type, alternatives(kind)))


def name_of_type(kind: Any) -> str:
    """Return what one type is called."""
    origin = get_origin(kind) or kind
    if origin is Literal:
        return ", ".join(map(str, get_args(kind)))
    if origin is list and get_args(kind):
        return f"a list, as [A,B], each {TYPES.get(get_args(kind)[0], 'an entry')}"
    return "a list" if origin in (list, tuple) else TYPES.get(kind, "a section")
