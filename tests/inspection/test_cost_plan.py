"""Forecasts of a larger datastore's costs: laws, small runs, comparison with a size that was run, impossible requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from trime.errors import UserError
from trime.inspection.cost_plan import GROWING, CostForecast
from trime.inspection.growth import CONSTANT, LINEAR, Law
from trime.pipeline.manifest import build_seconds
from trime.plan.by_task import build_plan
from trime.run.runner import run

Tiny = Callable[..., DictConfig]
SMALL = (
    "experiment=knn_lm",
    "evaluate.tokens=200",
    "plan.updates=2",
    "plan.probes=[1k,2k,3k]",
    "stages=[plan]",
    "mixture=none",
)


def test_a_law_is_found_again() -> None:
    """Also beside terms that it does not have; what is shared among machines is all but the constant term."""
    law = Law.fitted((*LINEAR, lambda n: n**1.5), [100, 400, 900], [7 + 0.5 * n for n in (100, 400, 900)])
    assert law.at(10_000) == pytest.approx(5007) and law.on_machines(10_000, 4) == pytest.approx(7 + 1250)
    assert Law.fitted(CONSTANT, [100, 200], [3.0, 3.0]).at(10**9) == pytest.approx(3)
    assert Law.fitted(LINEAR, [100, 200], [4.0, 2.0]).at(10**6) == pytest.approx(2.4), "costs do not fall"


@pytest.mark.parametrize("index", ["exact", "cells"])
def test_a_forecast_and_what_it_is_made_from(
    index: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(*SMALL, f"index={index}", "plan.tokens=1B", "plan.nodes=8", "plan.check=[4k]", f"paths.outputs={tmp_path}")
    run(config)
    shown, (file,) = capsys.readouterr().out, tmp_path.glob("plans/*.json")
    content = json.loads(file.read_text())
    assert "1,000,000,000 entries" in shown and "8 machines" in shown and content["probes"] == [1000, 2000, 3000]
    stages = {row["stage"]: row for row in content["rows"] if "seconds" in row}
    assert [*stages] == ["prepare", "fit", "encode", "datastore", "tune", "evaluate"]
    for stage in stages.values():
        assert 0 < stage["seconds_on_machines"] <= stage["seconds"]
    assert stages["encode"]["bytes"] > 10**9 * 2 * config.model.width, "keys of two bytes a number"
    searched = [row for row in content["rows"] if row["stage"] == "search"]
    assert len(searched) == 3 and all(0 < row["of_ideal"] < 1 + 1e-6 for row in searched) and "one at half the speed" in shown
    checked = {row["stage"]: row for row in content["rows"] if "measured" in row}
    assert set(checked) == {*GROWING, "all"} and all(line["entries"] == 4000 for line in checked.values())
    artefacts = CostForecast(build_plan(config)).artefacts(4000)
    encoded = [artefact for stage, artefact in artefacts if stage == "encode"]
    assert checked["encode"]["measured"] == sum(max(0.01, build_seconds(artefact.folder)) for artefact in encoded)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment=trime"], "no datastore to plan for"),
        (["plan.probes=[1k,1000]"], "at least 2 different sizes"),
        (["plan.probes=[1k,2k,1G]"], "set plan.probes"),
        (["plan.check=[1G]"], "set plan.probes and plan.check"),
        (["plan.tokens=1B"], "would be searched exactly, but 1,000,000,000 by"),
        (["index=ivf", "index.factory=IVF512_SQ8"], "1,000 entries are too few for this index"),
        (["datastore.path=somewhere"], "leave datastore.path out"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(words: list[str], message: str, tiny: Tiny) -> None:
    with pytest.raises(UserError, match=message) as error:
        run(tiny(*SMALL, *words))
    assert "\n" not in str(error.value)
