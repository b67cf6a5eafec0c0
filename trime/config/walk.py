"""The one walk over the schema, from which checks, messages and --help come."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any, NamedTuple

from trime.config.fields import Rule, help_of
from trime.config.schema import Settings


class Entry(NamedTuple):
    """A setting or a section of the schema, with its whole key and its type."""

    key: str
    kind: Any
    field: Field[Any]

    @property
    def is_section(self) -> bool:
        """Whether it holds settings of its own."""
        return is_dataclass(self.kind)

    @property
    def rule(self) -> Rule | None:
        """What its value may be beyond its type; None for a section."""
        rule = self.field.metadata.get("rule")
        return replace(rule, many=True) if rule and typing.get_origin(self.kind) is list else rule

    @property
    def default(self) -> Any:
        """The value where nothing sets another; lists and sections are new objects each time."""
        return self.field.default_factory() if self.field.default_factory is not MISSING else self.field.default

    @property
    def help(self) -> str:
        """What the setting does, in the words of the schema that --help prints; empty where it has none."""
        return help_of(self.field)


def schema_entries(section: type = Settings, prefix: str = "") -> Iterator[Entry]:
    """Yield each setting and section below a section of the schema, a section before what it holds."""
    hints = typing.get_type_hints(section)
    for field in fields(section):
        entry = Entry(f"{prefix}{field.name}", hints[field.name], field)
        yield entry
        if entry.is_section:
            yield from schema_entries(entry.kind, f"{entry.key}.")
