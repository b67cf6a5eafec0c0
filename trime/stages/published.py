"""Published results with the command that reproduces each (conf/published_attendre.yaml): Attendre's tables."""

from __future__ import annotations

from typing import Any, NamedTuple

import yaml

from trime.config.folder import CONF

PUBLISHED = CONF / "published_attendre.yaml"


class PublishedCell(NamedTuple):
    """A cell of a published table: exact match in %; ``tolerance`` is None if the paper's model is not public."""

    table: str
    row: str
    column: str
    value: float
    tolerance: float | None
    command: str  # the experiment and its overrides

    @property
    def name(self) -> str:
        """Return the name of the runs that the command makes."""
        return self.command.split()[0].replace("/", "_")

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of the command line."""
        return f"experiment={self.command}".split()


def published_cells() -> list[PublishedCell]:
    """Return every cell of the file, row by row."""
    tables = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    return [cell for table, content in tables.items() for cell in cells_of_table(table, content)]


def cells_of_table(table: str, content: dict[str, Any]) -> list[PublishedCell]:
    """Return the cells of one table of the file."""
    return [
        PublishedCell(table, row, column, value, content.get("tolerance"), f"{description['experiment']} {override}")
        for row, description in content["rows"].items()
        for (column, override), value in zip(content["columns"].items(), description["results"], strict=True)
    ]
