"""The ledger: published cells, decided by runs of exactly their configuration; a planted off-by-one turns one red."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from tests.conftest import composed
from tests.golden.published import parametrized
from tests.golden.runs import overrides
from tests.golden.scored import CASES
from tests.helpers.results import answered
from trime.common.types import TokenPosition
from trime.lab.config_hash import config_hash
from trime.lab.runner import run
from trime.memory.inference.evicting import FifoTokenMemory
from trime.memory.training.visibility import Local, same
from trime.report.results import results_in
from trime.report.run_result import RunResult, run_from_json
from trime.stages.ledger import Cell, answered_cells, reproduced_cells, with_answers

LOCAL = [
    name
    for name, case in CASES.items()
    if case["split"] == "valid" and {"gn", "--use-local"} <= {*case["flags"]} and not case["datastore"]
]
LONG = [name for name in LOCAL if "--use-long" in CASES[name]["flags"] and not CASES[name]["mem_cleared_at"]]


def overrides_of(cell: Cell) -> list[str]:
    return f"experiment={cell.experiment}".split()


def test_a_run_of_a_published_model_decides_its_cell() -> None:
    """By exact match in per cent, within two standard errors; a stand-in's run decides nothing."""
    cells = {(cell.table, cell.row, cell.column): cell for cell in answered_cells()}
    ours = cells["Attendre Table 5", "M = 512, N = 256", "LRAsum"]
    name = config_hash(composed(*overrides_of(ours), "questions.path=/somewhere", "answering.batch_size=2", "logger=none"))
    runs = [published_run("attendre_table5_waiting", name, share) for share in (0.1, 0.5339)]
    states = [with_answers(ours, candidates).state for candidates in (runs, runs[:1], [])]
    assert states == ["ok", "off", "not run"]
    assert with_answers(cells["Attendre Table 5", "M = 512, N = 256", "LRAmax"], runs).state == "not run"
    assert config_hash(composed(*overrides_of(ours), "model.name=google/flan-t5-xl")) != name
    theirs = cells["Attendre Table 3", "M = 512, N = 256", "LRAsum"]
    runs[0] = published_run("attendre_table3_waiting", config_hash(composed(*overrides_of(theirs))), 0.1)
    assert with_answers(theirs, runs).state == "not run"


def published_run(name: str, hash: str, share: float) -> RunResult:
    """Return the results of an experiment that answered this share of the questions of valid."""
    content = answered("fifo", 512, share)
    return run_from_json(content | {"name": name, "config_hash": hash, "metrics": {"valid": content["metrics"]["test"]}})


def test_what_the_hash_depends_on() -> None:
    given = [config_hash(composed("experiment=cache", f"checkpoint={place}/fit-{name}")) for place in "ab" for name in "cd"]
    assert given[0] == given[2] != given[1] == given[3], "a model of one's own is known by its folder's name, wherever it lies"
    base = config_hash(composed("experiment=reproduce/table2/trime"))
    unchanged = [
        "seed=3",
        "paths.outputs=elsewhere",
        "dataset.path=/somewhere",
        "logger=none",
        "trainer.devices=4",
        "train.log_every=7",
    ]
    for override in unchanged:
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
        "long.across_documents=false",
        "compatibility=published",
    ):
        assert config_hash(composed("experiment=reproduce/table2/trime", override)) != base


def off_by_one(self: Local, query: TokenPosition, memory: TokenPosition) -> torch.Tensor:
    return same(query.segment, memory.segment) & (memory.position[None, :] <= query.position[:, None])


def late_write(self: FifoTokenMemory, contexts: object, keep_extra: int = 0) -> None:
    """A long memory that leaves out the newest entry of each window."""
    newest = contexts.take(slice(None, -1))  # type: ignore[attr-defined]
    joined = newest if self.contexts is None else type(newest).concat([self.contexts, newest])
    self.contexts = joined.take(slice(max(0, len(joined.token) - self.sizes[-1] - keep_extra), None))


@parametrized("name", [name for name in LOCAL if "--use-long" not in CASES[name]["flags"]][:1] + LONG[:1])
def test_a_planted_off_by_one_turns_a_cell_red(
    name: str, tiny: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    perplexity = 2 ** case["loss_base2"]
    shared = {"table": "vectors", "tolerance": 2e-4 * perplexity, "split": "valid"}
    expected = {"row": name, "shared": shared, "columns": {"dev": {}}, "cells": {"dev": perplexity}}

    def states(outputs: Path) -> list[str]:
        config = tiny(*overrides(case), f"paths.outputs={outputs}", "name=vectors")
        OmegaConf.update(config, "expected", expected, force_add=True)
        assert [found.state for found in reproduced_cells(name, expected, results_in([outputs]), config)] == ["not run"]
        run(config)
        return [found.state for found in reproduced_cells(name, expected, results_in([outputs]), config)]

    assert states(tmp_path / "right") == ["ok"]
    if "--use-long" in case["flags"]:
        monkeypatch.setattr(FifoTokenMemory, "write", late_write)
    else:
        monkeypatch.setattr(Local, "sees", off_by_one)
        monkeypatch.setattr(Local, "rules_out", lambda *_: False)
    assert states(tmp_path / "wrong") == ["off"]
