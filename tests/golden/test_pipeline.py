"""The command line from a released checkpoint and its text to the loss that the published program printed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from tests.golden.published import parametrized
from tests.golden.runs import STAGES, overrides
from tests.golden.scored import CASES
from trime.lab.runner import run
from trime.stages.graph import Graph

RUN = [name for name, case in CASES.items() if case["datastore"] is None and "li" not in case["flags"]]


@parametrized("name", RUN)
def test_printed_loss(name: str, tiny: Callable[..., DictConfig]) -> None:
    case = CASES[name]
    config = tiny(*overrides(case), STAGES)
    run(config)
    graph = Graph(config)
    if case["split"] == "test":
        graph.test.make()
        graph.evaluate.make()
        (result,) = graph.evaluate.rows()
    else:
        (result,) = graph.tune.tuned()["rows"]
    assert result["tokens"] == case["tokens_scored"]
    assert result["loss"] / math.log(2) == pytest.approx(case["loss_base2"], abs=1e-4)


@parametrized("name", RUN[:1])
def test_results_say_what_was_imported(name: str, tiny: Callable[..., DictConfig], tmp_path: Path) -> None:
    case = CASES[name]
    config = tiny(*overrides(case), "stages=[import,prepare,encode,tune,evaluate,report]")
    run(config)
    results = (Graph(config).run_folder / "results.json").read_text()
    assert '"imported"' in results and "checkpoint_last.pt" in results and '"updates"' in results
    # The imported folder itself serves as a checkpoint.
    options = [word for word in overrides(case) if not word.startswith(("checkpoint=", "dictionary="))]
    again = tiny(*options, f"checkpoint={Graph(config).model.folder}", "dictionary=null", STAGES)
    run(again)
    assert Graph(again).tune.tuned()["rows"][0]["loss"] == Graph(config).tune.tuned()["rows"][0]["loss"]
