"""Published figures beside the command that answers for each (benchmarks/published.yaml): Attendre's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

PUBLISHED = Path(__file__).resolve().parents[2] / "benchmarks" / "published.yaml"


class Published(NamedTuple):
    """A cell of a table: exact match in %. ``tolerance``: None where the paper's model is not public."""

    table: str
    row: str
    column: str
    figure: float
    tolerance: float | None
    command: str  # the experiment and its overrides

    @property
    def name(self) -> str:
        """Return the name of the experiment's runs."""
        return self.command.split()[0].replace("/", "_")

    @property
    def overrides(self) -> list[str]:
        """Return the words of the command line."""
        return f"experiment={self.command}".split()


def published_figures() -> list[Published]:
    """Return every cell of the file, row by row."""
    tables = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    return [cell for table, content in tables.items() for cell in cells_of_table(table, content)]


def cells_of_table(table: str, content: dict[str, Any]) -> list[Published]:
    """Return the cells of a table, as the file describes it."""
    return [
        Published(table, row, column, figure, content.get("tolerance"), f"{described['experiment']} {override}")
        for row, described in content["rows"].items()
        for (column, override), figure in zip(content["columns"].items(), described["figures"], strict=True)
    ]
