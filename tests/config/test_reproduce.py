"""Published results that experiments expect (tests/golden/test_ledger.py has each experiment)."""

from __future__ import annotations

import yaml

from tests.conftest import ROOT
from trime.stages.ledger import expected_cells, reproductions

CELLS = [cell for expected in reproductions().values() for cell in expected_cells(expected)]


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


def test_results_beside_a_table_are_those_that_its_rows_reproduce() -> None:
    """Each number of conf/published.yaml is the published result of a row."""
    content = yaml.safe_load((ROOT / "conf" / "published.yaml").read_text())
    shown = {number for rows in content.values() for numbers in rows.values() for number in numbers}
    assert shown and not shown - {cell["value"] for cell in CELLS}
