"""What to say of an override that Hydra refuses: the setting, and what it must be."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin

from trime.config.fields import Rule
from trime.config.schema import Settings

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


def message_of(error: BaseException) -> str:
    """Return one line for an error of Hydra or OmegaConf about a setting; its own words where it is about another thing."""
    override = re.search(r"override ([^=\s]+=.*)", str(error))
    cause = error.__cause__ or error
    key = str(getattr(cause, "full_key", None) or "")
    schema = dict(schema_of(Settings))
    if missing := re.search(
        r"Could not find '([\w/]+)/(\w+)'\s+Available options in '[\w/]+':\s+(.*?)(?:Config search|$)", str(error), re.S
    ):
        return f"{missing[1]}={missing[2]}: choose from {', '.join(missing[3].split())}"
    if unknown := re.search(r"Could not override '([\w.@]+)'|Key '(\w+)' (?:is not|not) in", str(error)):
        return unknown_setting(unknown[1] or key, schema, str(error))
    if override and key in schema:
        return f"{override[1].strip()}: it must be {kind_text(*schema[key])}"
    return " ".join(str(error).split())


def schema_of(section: type, place: str = "") -> Iterator[tuple[str, tuple[Any, Rule | None]]]:
    """Yield each setting and section of the schema: its whole key, its type and its rule."""
    hints = typing.get_type_hints(section)
    for entry in fields(section):
        kind = hints[entry.name]
        yield f"{place}{entry.name}", (kind, entry.metadata.get("rule"))
        if is_dataclass(kind):
            yield from schema_of(kind, f"{place}{entry.name}.")  # type: ignore[arg-type]


def unknown_setting(key: str, schema: dict[str, Any], said: str) -> str:
    """Return what to say of a setting that there is not, with the nearest that there is."""
    near = difflib.get_close_matches(key, schema, 1, cutoff=0.8)
    if key in schema or not key:  # a group that is named in the wrong way: Hydra says how
        return " ".join(said.split())
    return f"there is no setting {key}" + (f": is it {near[0]}?" if near else "")


def kind_text(kind: Any, rule: Rule | None) -> str:
    """Return what a value of a type must be, to follow "must be"."""
    if rule and (rule.switch or rule.choices or rule.bounded) and get_origin(kind) is not list:
        return rule.text
    if is_dataclass(kind):
        return f"a section: set what stands in it, as {fields(kind)[0].name}"
    alternatives = get_args(kind) if get_origin(kind) in (typing.Union, UnionType) else (kind,)
    return " or ".join(text_of(alternative) for alternative in alternatives)


def text_of(kind: Any) -> str:
    """Return what one type is called."""
    if get_origin(kind) is list:
        return f"a list, as [A,B], each {KINDS.get(get_args(kind)[0], 'an entry')}"
    return KINDS.get(kind, "a section")
