"""Rows of published tables: what they inherit, what Hydra and --help make of them, and mistakes in their files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException

from tests.conftest import ROOT, composed
from trime.config.help import help_text
from trime.config.messages import message_of
from trime.config.reproduce import PublishedRow, read_table, reproduced_rows, tables
from trime.errors import UserError

TABLE = """
help: "Table 1, {row}: see data/{model}."
extends: [reproduce/conventions]
choices: {size: paper}
settings: {checkpoint: "${paths.data}/{model}/last.pt", evaluate: {lines: false, rows: [{joint: []}]}}
cells: {table: Table 1, tolerance: 2%}
columns: {dev: {split: valid}, speed: {column: "tokens/s", split: test, tolerance: null}}
deviations: [of all]
rows:
  vanilla:
  cached:
    row: Cache
    model: cache-7M
    experiment: cache
    choices: {size: paper_7m, index: exact}
    settings: {evaluate: {rows: [{joint: [local]}]}}
    expected: {dev: 67.45, speed: {value: 300, row: Cache (A100)}}
    deviations: [of one]
"""


def write_table(folder: Path, text: str = TABLE) -> dict[str, PublishedRow]:
    """Return the rows of a table's file."""
    (folder / "table1.yaml").write_text(text)
    return read_table(folder / "table1.yaml")


def test_a_row_is_an_experiment_with_what_its_table_has_in_common(tmp_path: Path) -> None:
    row = write_table(tmp_path)["cached"]
    assert row.config() == {
        "defaults": [
            "/experiment/cache",
            "/experiment/reproduce/conventions",
            {"override /size": "paper_7m"},
            {"override /index": "exact"},
            "_self_",
        ],
        "name": "reproduce_table1_cached",
        "checkpoint": "${paths.data}/cache-7M/last.pt",
        "evaluate": {"lines": False, "rows": [{"joint": ["local"]}]},
        "expected": [
            {"table": "Table 1", "row": "Cache", "column": "dev", "value": 67.45, "tolerance": 1.349, "split": "valid"},
            {"table": "Table 1", "row": "Cache (A100)", "column": "tokens/s", "value": 300, "tolerance": None, "split": "test"},
        ],
    }
    assert row.deviations == ["of all", "of one"] and row.help_text() == "Table 1, Cache: see data/cache-7M."


def test_a_row_starts_from_the_experiment_of_its_own_name(tmp_path: Path) -> None:
    config = write_table(tmp_path)["vanilla"].config()
    assert config["defaults"][0] == "/experiment/vanilla" and config["expected"] == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    row: Cache\n", "    raw: Cache\n", "table1.yaml: row cached has unknown keys: raw"),
        ("expected: {dev:", "expected: {valid:", "table1.yaml: row cached expects valid, not one of the columns"),
    ],
)
def test_a_mistake_in_a_table_names_file_and_row(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        write_table(tmp_path, TABLE.replace(old, new))


def test_hydra_lists_tables_and_rows() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        groups = loader.get_group_options("experiment/reproduce", ObjectType.GROUP)
        assert groups == sorted(tables())
        assert loader.get_group_options("experiment/reproduce", ObjectType.CONFIG) == ["commands", "conventions", "translation"]
        rows = loader.get_group_options("experiment/reproduce/table7")
        assert rows == ["trime", "trime_ext", "trime_long"]
        assert loader.get_group_options("experiment/reproduce/table7", ObjectType.GROUP) == []


def test_an_unknown_row_is_refused_in_one_line() -> None:
    for name in ("table2/nonsense", "table99/trime", "nonsense"):
        with pytest.raises(HydraException) as refused:
            composed(f"experiment=reproduce/{name}")
        parent, _, row = f"experiment/reproduce/{name}".rpartition("/")
        message = message_of(refused.value)
        assert message.startswith(f"{parent}={row}: choose from ") and "\n" not in message


def test_help_lists_the_rows_of_a_table() -> None:
    rows = [name for name in reproduced_rows() if name.startswith("reproduce/table3/")]
    lines = help_text(ROOT / "conf", "experiment/reproduce/table3").splitlines()
    assert len(lines) == 1 + len(rows) and lines[1].split()[0] == "cache_long"
    assert "{" not in "".join(row.help_text() for row in reproduced_rows().values())
    assert "  experiment/reproduce/table3: cache_long, trime, " in help_text(ROOT / "conf")
    assert "  reproduce: " not in help_text(ROOT / "conf")


@pytest.mark.parametrize("name", ["models", *(f"table{number}" for number in (5, 7, 11, 12, 15))])
def test_figures_beside_a_table_are_those_that_its_rows_reproduce(name: str) -> None:
    """Each number of conf/published stands in conf/reproduce too, as the published result of a row."""
    content = yaml.safe_load((ROOT / "conf/published" / f"{name}.yaml").read_text())
    shown = {number for rows in content.values() for numbers in rows.values() for number in numbers}
    cells = [cell for row in reproduced_rows().values() for cell in row.expected.values()]
    expected = {cell["value"] if isinstance(cell, dict) else cell for cell in cells}
    assert shown and not shown - expected
