"""Rows of published tables are experiments: what their files expect is what Hydra composes."""

from __future__ import annotations

import pytest
import yaml

from tests.conftest import ROOT, experiment
from trime.inspection.ledger import expected_cells, reproductions
from trime.io import plain

CELLS = {name: expected_cells(expected) for name, expected in reproductions().items()}


def test_a_cell_has_what_its_table_row_and_column_say() -> None:
    shared, columns = (
        {"table": "Table 1", "tolerance": "2%"},
        {"dev": {"split": "valid"}, "speed": {"column": "tokens/s", "split": "test"}},
    )
    cells = {"dev": 67.45, "speed": {"value": 300, "row": "Cache (A100)", "tolerance": None}}
    assert expected_cells({"row": "Cache", "shared": shared, "columns": columns, "cells": cells}) == [
        {"table": "Table 1", "row": "Cache", "column": "dev", "value": 67.45, "tolerance": 1.349, "split": "valid"},
        {"table": "Table 1", "row": "Cache (A100)", "column": "tokens/s", "value": 300, "tolerance": None, "split": "test"},
    ]


@pytest.mark.parametrize("name", CELLS)
def test_a_row_expects_what_hydra_composes(name: str) -> None:
    config = experiment(name)
    assert config.name == name.replace("/", "_") and expected_cells(plain(config.expected)) == CELLS[name]


def test_results_beside_a_table_are_those_that_its_rows_reproduce() -> None:
    """Each number of conf/published.yaml is the published result of a row."""
    content = yaml.safe_load((ROOT / "conf" / "published.yaml").read_text())
    shown = {number for rows in content.values() for numbers in rows.values() for number in numbers}
    assert shown and not shown - {cell["value"] for cells in CELLS.values() for cell in cells}
