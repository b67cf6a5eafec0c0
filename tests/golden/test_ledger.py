"""The ledger: published cells, decided by runs of exactly their configuration; a planted off-by-one turns one red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from tests.conftest import composed, experiment
from tests.golden.published import parametrized
from tests.golden.runs import overrides
from tests.golden.scored import CASES
from tests.helpers.results import answered
from trime.common.io import plain
from trime.common.types import TokenPosition
from trime.lab.config_hash import config_hash
from trime.lab.runner import run
from trime.memory.inference.fifo import FifoTokenMemory
from trime.memory.training.visibility import Local, same
from trime.report.results import results_in
from trime.report.run_result import RunResult, run_from_json
from trime.stages.ledger import Cell, answered_cells, ledger_page, reproduced_cells, reproductions, with_answers, write_ledger
from trime.stages.pretrained import reading_config

LOCAL = [
    name
    for name, case in CASES.items()
    if case["split"] == "valid" and {"gn", "--use-local"} <= {*case["flags"]} and not case["datastore"]
]
LONG = [name for name in LOCAL if "--use-long" in CASES[name]["flags"] and not CASES[name]["mem_cleared_at"]]


@pytest.mark.parametrize("name", reproductions())
def test_a_reproduction_states_its_results(name: str) -> None:
    """Its configuration composes at paper scale, and no other has its hash but the one that shares its settings."""
    config = experiment(name)
    assert config.name == "reproduce_" + name.removeprefix("reproduce/").replace("/", "_")
    assert config.evaluate.tokens is None
    assert config.task == "translation" or (not config.evaluate.bounded and config.long.across_documents)
    cells = reproduced_cells(name, plain(config.expected), [], config)
    assert [replace(cell, config_hash="") for cell in cells] == reproduced_cells(name, reproductions()[name], [])
    for cell in cells:
        assert cell.state == "not run" and cell.target > 0
        assert (cell.tolerance is None) == cell.column.startswith("speed")
        assert cell.tolerance is None or 0 < cell.tolerance <= max(0.5, 0.04 * cell.target)


def test_every_cell_of_the_tables_is_there() -> None:
    """As many cells as the papers' tables have results of these systems, twice where the script trains otherwise."""
    cells = [cell for name, expected in reproductions().items() for cell in reproduced_cells(name, expected, [])]
    counts: dict[str, int] = {}
    for cell in [*cells, *answered_cells()]:
        counts[cell.table] = counts.get(cell.table, 0) + 1
    assert len({(cell.table, cell.row, cell.column) for cell in [*cells, *answered_cells()]}) == sum(counts.values())
    expected = {2: 39, 3: 16, 4: 20, 5: 14, 6: 6, 7: 9, 10: 16, 11: 3, 12: 9, 13: 8, 14: 30, 15: 5}
    assert {f"TRIME Table {number}": count for number, count in expected.items()} == {
        table: count for table, count in counts.items() if table.startswith("TRIME Table")
    }
    assert {table: count for table, count in counts.items() if table.startswith("Attendre")} == {
        "Attendre Table 2": 6,
        "Attendre Table 3": 63,
        "Attendre Table 4": 6,
        "Attendre Table 5": 63,
    }


POLICIES = {  # Attendre: by column, the policy, its c (None: it has none) in Tables 3 and 5, and its gamma
    "MT": ("FIFO", None, None, None),
    "AS": ("Sink", None, None, None),
    "LRAlast": ("LRALast", 2.0, 1.0, None),
    "LRAmax": ("LRAMax", 1.5, 1.0, None),
    "LRAsum": ("LRASum", 1.5, 1.0, None),
    "LFA-0": ("LFA", 1.0, 1.0, 0.0),
    "LFA-γ": ("LFA", 1.0, 1.0, 0.01),
}


@cache
def compose_choices(*choices: str) -> DictConfig:
    """Compose an experiment with choices of its groups, and its sweep."""
    return composed(*choices, return_hydra=True)


def overrides_of(cell: Cell) -> list[str]:
    return f"experiment={cell.experiment}".split()


def config_of(cell: Cell) -> DictConfig:
    """Compose a cell's command; values are set last, as Hydra does."""
    words = overrides_of(cell)
    config = compose_choices(*(word for word in words if "." not in word)).copy()
    for key, value in (word.split("=") for word in words if "." in word):
        OmegaConf.update(config, key, yaml.safe_load(value))
    return config


@pytest.mark.parametrize("table", ["Attendre Table 2", "Attendre Table 3", "Attendre Table 4", "Attendre Table 5"])
def test_every_cell_of_attendre_names_its_command(table: str) -> None:
    """Each command is one run of that policy, M, N, c and length, over the paper's validation questions."""
    for cell in (cell for cell in answered_cells() if cell.table == table):
        config = config_of(cell)
        assert config.name == cell.experiment.split()[0].replace("/", "_")
        keys = {word.split("=")[0] for word in overrides_of(cell)}
        assert config.hydra.sweeper.params.keys() <= keys, "a command is one run: it sets all that the experiment sweeps over"
        assert config.stages == ["answer"] and config.answering.split == "valid" and config.answering.max_new_tokens == 32
        assert config.questions._target_.endswith("TriviaQA") and config.questions.count == 1000
        encodes = table[-1] in "45"
        assert (config.model.name == "google/flan-t5-xxl") == encodes == (cell.tolerance is not None)
        family = SimpleNamespace(layers=[0], windows=[None], causal=not encodes)
        (layer,) = reading_config(plain(config.model), plain(config.eviction), family).memories
        assert layer.causal is (not encodes and (table[-1] == "2" or "N = 0" in cell.row))
        if table[-1] in "24":
            tokens = 4096 if cell.column == "4196 tokens" else int(cell.column.split()[0])
            assert config.answering.max_prompt_tokens == tokens and layer.top_k is None and layer.keys.size >= tokens + 32
            assert layer.query_size == (layer.keys.size if encodes else 0), "an encoder's queries wait for all"
            continue
        size, waiting = (int(part.split(" = ")[1]) for part in cell.row.split(", "))
        assert (layer.keys.size, layer.query_size, layer.top_k, config.answering.max_prompt_tokens) == (
            size,
            waiting,
            128,
            None,
        )
        kind, c_decoder, c_encoder, gamma = POLICIES[cell.column]
        policy = layer.keys.policy
        assert type(policy).__name__ == kind and getattr(policy, "gamma", None) == gamma
        assert getattr(policy.initial, "c", None) == (c_encoder if encodes else c_decoder)
        assert config.model.chunk == 128 and config.model.outputs == 8192 and policy.sinks == (4 if kind == "Sink" else 0)


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


def test_the_page(tmp_path: Path) -> None:
    path = write_ledger(composed(f"paths.outputs={tmp_path}"))
    text = path.read_text()
    assert text.count("| not run |") == text.count("`python cli.py") > 250
    assert "`python cli.py experiment=attendre/table5_waiting model.memory_size=512 eviction=table5/lra_sum`" in text
    assert "- `reproduce/table2/trime_ext`: Algorithm 1 as the paper has it" in text
    cell = Cell("TRIME Table 2", "row", "dev", 17.10, 0.1, "reproduce/x", "0")
    states = [Cell(**{**cell.__dict__, "value": value}).state for value in (None, 17.19, 17.21, 16.9)]
    assert replace(cell, tolerance=None, value=3000.0).state == "other machine"
    assert states == ["not run", "ok", "off", "off"] and "1 off" in ledger_page([Cell(**{**cell.__dict__, "value": 3.0})])


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
