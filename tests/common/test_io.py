"""Files that the lab writes: no number in them is NaN or infinite, and those of older versions are read whatever they hold."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.helpers.results import made, scored
from trime.common.io import checksum_of, to_json, write_json
from trime.errors import UserError
from trime.report.results import read_run, write_results
from trime.report.run_result import ScoredRun
from trime.scoring.loss_sums import LossSums


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_named_and_not_written(value: float, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    with pytest.raises(UserError, match=rf"rows.json: 1.tuned.loss is {value}"):
        write_json(file, [{"loss": 1.0}, {"tuned": {"loss": value}}])
    with pytest.raises(UserError, match=rf"results.json: tuned.k is {value}"):
        write_results(tmp_path / "results.json", scored(made("trime", 0, [1.0]) | {"tuned": {"k": value}}))
    with pytest.raises(UserError, match="loss"):
        to_json({"loss": value}, file, indent=None)
    assert not [*tmp_path.iterdir()]


def test_results_of_older_versions_may_hold_nan(tmp_path: Path) -> None:
    content = made("old", 0, [math.nan])
    (tmp_path / "results.json").write_text(json.dumps(content | {"checksum": checksum_of(content)}))
    read = read_run(tmp_path / "results.json")
    assert isinstance(read, ScoredRun) and math.isnan(read.row.loss)


def test_a_loss_that_is_nan_is_refused_where_it_is_summed() -> None:
    """argmin would take it for the best one."""
    sums = LossSums()
    sums.put((3, 0), torch.ones(1, 2), 5)
    with pytest.raises(UserError, match=r"document 3, from token 1,024 on"):
        sums.put((3, 1), torch.tensor([[1.0, math.nan]]), 5)
    assert sums.tokens == 5
