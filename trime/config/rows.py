"""The rows of tables in conf/rows: one file a table, and in it one YAML document for each experiment=TABLE/ROW."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trime.config.folder import CONF

ROWS = CONF / "rows"
BETWEEN = "\n---\n"


class Row(NamedTuple):
    """An experiment of a table: its text, comments included, its settings; without a ``name`` it is shared by the others."""

    group: str  # of the experiment: reproduce/table2
    name: str
    text: str
    settings: dict[str, Any]

    @property
    def experiment(self) -> str:
        """The choice of ``experiment=``."""
        return f"{self.group}/{self.name}" if self.name else self.group


def rows_in(file: Path) -> Iterator[Row]:
    """Yield the rows of a table's file; each is named after its table and its ``row``, unless it has a name of its own."""
    group = file.relative_to(ROWS).with_suffix("").as_posix()
    for text in file.read_text(encoding="utf-8").split(BETWEEN):
        settings = yaml.load(text, yaml.CSafeLoader)
        row = settings.pop("row", "")
        settings["defaults"] = [*settings["defaults"], "_self_"]
        if row:
            settings.setdefault("name", f"{group}/{row}".replace("/", "_"))
        yield Row(group, row, text, settings)


@cache
def all_rows() -> tuple[Row, ...]:
    """Return the rows of all tables, with the settings that the rows of a table share."""
    return tuple(row for file in sorted(ROWS.rglob("*.yaml")) for row in rows_in(file))
