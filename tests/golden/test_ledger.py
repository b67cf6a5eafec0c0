"""The ledger: published cells, decided by runs of exactly their configuration; a planted off-by-one turns one red."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from tests.conftest import ROOT, composed
from tests.golden.published import parametrized
from tests.golden.scored import CASES
from tests.golden.test_pipeline import overrides
from trime.memory.recent import Recent
from trime.memory.visibility import Local, same
from trime.run import run
from trime.stages.report.ledger import Cell, cells_of, config_hash, experiments, later, page, results_in, write_ledger
from trime.types import Place

LOCAL = [
    name
    for name, case in CASES.items()
    if case["split"] == "valid" and {"gn", "--use-local"} <= {*case["flags"]} and not case["datastore"]
]
LONG = [name for name in LOCAL if "--use-long" in CASES[name]["flags"] and not CASES[name]["mem_cleared_at"]]


@cache
def reproduction(name: str) -> DictConfig:
    """Return an experiment's configuration, composed once."""
    return composed(f"experiment={name}")


@pytest.mark.parametrize("name", experiments())
def test_a_reproduction_states_its_figures(name: str) -> None:
    """Its configuration composes at paper scale, and no other has its hash but the one that shares its settings."""
    config = reproduction(name)
    assert config.name == "reproduce_" + name.removeprefix("reproduce/").replace("/", "_")
    assert config.evaluate.tokens is None
    assert config.task == "translation" or (not config.evaluate.bounded and config.long.crossing)
    for cell in cells_of(name, config, []):
        assert cell.state == "not run" and cell.target > 0 and 0 < cell.tolerance <= max(0.5, 0.04 * cell.target)
    text = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")


def test_every_cell_of_the_tables_is_there() -> None:
    """As many cells as the papers' tables have figures of these systems, twice where the script trains otherwise."""
    cells = [cell for name in experiments() for cell in cells_of(name, reproduction(name), [])] + later()
    counts: dict[str, int] = {}
    for cell in cells:
        counts[cell.table] = counts.get(cell.table, 0) + 1
    assert len({(cell.table, cell.row, cell.column) for cell in cells}) == len(cells)
    expected = {2: 28, 3: 16, 4: 20, 5: 14, 6: 3, 7: 9, 10: 16, 11: 3, 12: 9, 13: 8, 14: 30, 15: 5}
    assert {f"TRIME Table {number}": count for number, count in expected.items()} == {
        table: count for table, count in counts.items() if table.startswith("TRIME Table")
    }
    assert {table: count for table, count in counts.items() if table.startswith("Attendre")} == {
        "Attendre Table 2": 6,
        "Attendre Table 3": 63,
        "Attendre Table 4": 6,
        "Attendre Table 5": 63,
    }


def test_what_the_hash_depends_on() -> None:
    base = config_hash(composed("experiment=reproduce/table2/trime"))
    same_ = [
        "seed=3",
        "paths.outputs=elsewhere",
        "dataset.path=/somewhere",
        "logger=none",
        "trainer.devices=4",
        "train.log_every=7",
    ]
    for override in same_:
        assert config_hash(composed("experiment=reproduce/table2/trime", override)) == base
    assert config_hash(composed("experiment=reproduce/table2/knn_lm", "datastore.path=/a/small/one")) != config_hash(
        composed("experiment=reproduce/table2/knn_lm")
    )
    for override in (
        "checkpoint=/my/own/model.pt",
        "trainer.precision=bf16-true",
        "evaluate.tokens=1k",
        "size=tiny",
        "train.updates=3",
        "long.crossing=false",
        "compatibility=published",
    ):
        assert config_hash(composed("experiment=reproduce/table2/trime", override)) != base


def test_the_page(tmp_path: Path) -> None:
    path = write_ledger(composed(f"paths.outputs={tmp_path}"))
    text = path.read_text()
    assert text.count("| not run |") == text.count("`python cli.py") + text.count("no experiment yet") > 250
    cell = Cell("TRIME Table 2", "row", "dev", 17.10, 0.1, "reproduce/x", "0")
    states = [Cell(**{**cell.__dict__, "value": value}).state for value in (None, 17.19, 17.21, 16.9)]
    assert states == ["not run", "ok", "off", "off"] and "1 off" in page([Cell(**{**cell.__dict__, "value": 3.0})])


def off_by_one(self: Local, query: Place, memory: Place) -> torch.Tensor:
    return same(query.segment, memory.segment) & (memory.position[None, :] <= query.position[:, None])


def late_write(self: Recent, seen: object, overlap: int = 0) -> None:
    """A long memory that leaves out the newest entry of each window."""
    newest = seen.take(slice(None, -1))  # type: ignore[attr-defined]
    joined = newest if self.seen is None else type(newest).joined([self.seen, newest])
    self.seen = joined.take(slice(max(0, len(joined.token) - self.sizes[-1] - overlap), None))


@parametrized("name", [name for name in LOCAL if "--use-long" not in CASES[name]["flags"]][:1] + LONG[:1])
def test_a_planted_off_by_one_turns_a_cell_red(
    name: str, tiny: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    perplexity = 2 ** case["loss_base2"]
    cell = {
        "table": "vectors",
        "row": name,
        "column": "dev",
        "value": perplexity,
        "tolerance": 2e-4 * perplexity,
        "split": "valid",
    }

    def states(outputs: Path) -> list[str]:
        config = tiny(*overrides(case), f"paths.outputs={outputs}", "name=vectors")
        OmegaConf.update(config, "expected", [cell])
        assert [found.state for found in cells_of(name, config, results_in([outputs]))] == ["not run"]
        run(config)
        return [found.state for found in cells_of(name, config, results_in([outputs]))]

    assert states(tmp_path / "right") == ["ok"]
    if "--use-long" in case["flags"]:
        monkeypatch.setattr(Recent, "write", late_write)
    else:
        monkeypatch.setattr(Local, "sees", off_by_one)
        monkeypatch.setattr(Local, "rules_out", lambda *_: False)
    assert states(tmp_path / "wrong") == ["off"]
