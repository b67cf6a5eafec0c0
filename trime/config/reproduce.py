"""The experiments reproduce/TABLE/ROW: one file of rows for each published table, conf/reproduce/TABLE.yaml.

``rows`` maps the names of experiments to their rows; all other keys of a file are what its rows have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trime.config.folder import CONF
from trime.errors import UserError

PREFIX = "reproduce"  # of the names of experiments, and the folder of tables in conf/
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CELL_KEYS = ("table", "row", "column", "value", "tolerance", "split")  # of every expected result, in this order
PLACEHOLDERS = ("row", "experiment", "model")  # {row} in help or settings stands for the value of that key


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published table: an experiment, what it changes there, and the published results that it reproduces."""

    name: str  # of the run
    experiment: str  # of conf/experiment, from which the row starts; by default that of the row's own name
    row: str = ""  # the row's title in the published table
    model: str = ""  # the folder of a released checkpoint
    help: str = ""  # for --help
    extends: list[str] = field(default_factory=list)  # further experiments, for instance conventions of evaluation
    choices: dict[str, str] = field(default_factory=dict)  # of groups
    settings: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)  # the published result, or all that its cell has, by column
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)  # what all cells of a column have in common
    cells: dict[str, Any] = field(default_factory=dict)  # what all cells of the row have in common
    deviations: list[str] = field(default_factory=list)  # from the paper or from the published command

    def config(self) -> dict[str, Any]:
        """Return the row as the content of an experiment's file."""
        bases = [f"/experiment/{name}" for name in (self.experiment, *self.extends)]
        choices = [{f"override /{group}": choice} for group, choice in self.choices.items()]
        own = {"name": self.name, **self.filled(self.settings), "expected": self.expected_cells()}
        return {"defaults": [*bases, *choices, "_self_"], **own}

    def expected_cells(self) -> list[dict[str, Any]]:
        """Return the published results that the row reproduces."""
        return [self.expected_cell(column, cell) for column, cell in self.expected.items()]

    def expected_cell(self, column: str, cell: Any) -> dict[str, Any]:
        """Return an expected result; a tolerance in % is relative to its value, rounded to three decimals."""
        cell = cell if isinstance(cell, Mapping) else {"value": cell}
        content = {"row": self.row, "column": column, **self.cells, **self.columns[column], **cell}
        if isinstance(content["tolerance"], str):
            percent = float(content["tolerance"].removesuffix("%"))
            content["tolerance"] = round(percent / 100 * content["value"], 3)
        return {key: content[key] for key in CELL_KEYS} | content

    def help_text(self) -> str:
        """Return the row's help."""
        return self.filled(self.help)

    def filled(self, value: Any) -> Any:
        """Return a value with the placeholders in its texts replaced."""
        if isinstance(value, Mapping):
            return {key: self.filled(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self.filled(part) for part in value]
        if isinstance(value, str):
            for key in PLACEHOLDERS:
                value = value.replace(f"{{{key}}}", getattr(self, key))
        return value


def tables(folder: Path = CONF / PREFIX) -> dict[str, Path]:
    """Return the files of all tables by the tables' names."""
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


@cache
def read_table(path: Path) -> dict[str, PublishedRow]:
    """Return the rows of a table by their names, in alphabetical order."""
    common = yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER)
    rows = common.pop("rows")
    return {name: read_row(path, name, common, rows[name] or {}) for name in sorted(rows)}


def read_row(path: Path, name: str, common: Mapping[str, Any], own: Mapping[str, Any]) -> PublishedRow:
    """Return a row of a table's file."""
    content = {"name": f"{PREFIX}_{path.stem}_{name}", "experiment": name, **merged(common, own)}
    content["deviations"] = [*common.get("deviations", []), *own.get("deviations", [])]
    if unknown := content.keys() - {entry.name for entry in fields(PublishedRow)}:
        raise UserError(f"{path}: row {name} has unknown keys: {', '.join(sorted(unknown))}")
    if unknown := content.get("expected", {}).keys() - content.get("columns", {}).keys():
        raise UserError(f"{path}: row {name} expects {', '.join(sorted(unknown))}, not one of the columns")
    return PublishedRow(**content)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings as one, key by key at every depth; values of ``above`` take precedence."""
    both = dict(below)
    for key, value in above.items():
        either = both.get(key)
        both[key] = merged(either, value) if isinstance(value, Mapping) and isinstance(either, Mapping) else value
    return both


def reproduced_rows(folder: Path = CONF / PREFIX) -> dict[str, PublishedRow]:
    """Return the rows of all tables by the names of their experiments, as reproduce/table2/trime."""
    return {f"{PREFIX}/{table}/{name}": row for table, path in tables(folder).items() for name, row in read_table(path).items()}
