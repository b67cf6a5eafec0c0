"""What every finished run leaves behind, and what the same command does again."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT, Tiny
from tests.helpers.runs import SharedRun
from trime.lab.runner import run


def documented_keys(start: str, end: str) -> set[str]:
    """Return the words in backticks between two strings of docs/experiments.md."""
    text = (ROOT / "docs" / "experiments.md").read_text().partition(start)[2].partition(end)[0]
    return {*re.findall(r"`(\w+)`", text)}


def test_results_have_the_documented_keys(shared: SharedRun) -> None:
    row = "| key of a row"
    keys, row_keys = documented_keys("## The file `results.json`", row), documented_keys(row, "\n## ")
    assert {"seed", "commit", "versions", "hardware", "metrics"} <= shared.results.keys()
    if shared.name != "decoder":
        assert shared.results.keys() <= keys and {"dataset", "parameters", "train", "tuned"} <= shared.results.keys()
        assert shared.results["train"].keys() | shared.results["dataset"].keys() <= keys
        assert all(row.keys() <= row_keys for rows in shared.results["metrics"].values() for row in rows)


@pytest.mark.parametrize("name", ["language", "stateful"])
def test_documents_sum_to_the_loss_of_a_row(name: str, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue(name).results
    assert results["durations"].keys() >= {"prepare", "fit", "encode", "tune", "evaluate"}
    for row in results["metrics"]["test"]:
        assert sum(count for _, count in row["documents"]) == row["tokens"] == (2000 if name == "language" else 1000)
        assert abs(sum(loss for loss, _ in row["documents"]) / row["tokens"] - row["loss"]) < 1e-9
        assert row["tokens_per_second"] > 0 and row["peak_memory_mb"] > 50


def test_the_same_command_finds_everything(shared: SharedRun, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    run(shared.graph.config)
    assert "made" not in capsys.readouterr().out


def test_a_report_of_several_runs(
    language: SharedRun, stateful: SharedRun, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    config = tiny("experiment=trime", "stages=[report]", f"paths.outputs={tmp_path}", pictures=True)
    config.report.runs = [f"{one.outputs}/runs/**" for one in (language, stateful)]
    run(config)
    folder = tmp_path / "reports" / "latest"
    table = (folder / "table.md").read_text()
    printed = capsys.readouterr().out
    assert "best test perplexity" in " ".join(printed.split())
    assert max(len(line) for line in printed.splitlines() if "seed" in line) <= 100
    assert (folder / "picture.png").stat().st_size > 5000
    for one in (language, stateful):
        assert f"{one.results['metrics']['test'][-1]['perplexity']:.2f}" in table
    header = next(csv.reader((folder / "table.csv").open()))
    assert {"params", "dev perplexity", "test perplexity", "processor ms/token"} <= {*header}
    assert "paper" in table, "the paper's result beside a published row"


def test_wandb_has_tables_and_pictures_in_the_runs_folder(stateful: SharedRun) -> None:
    """Offline by default; the same command logs nothing twice."""
    (logged,) = stateful.folder.glob("wandb/offline-run-*")
    assert [*logged.glob("*.wandb")] and "train/loss" in (stateful.folder / "metrics.csv").read_text()
    tables = {file.name.split("_")[0]: json.loads(file.read_text()) for file in logged.glob("files/media/table/*.json")}
    assert tables["results"]["columns"][0] == "memories" and len(tables["samples"]["data"]) == 8
    assert len(tables["results"]["data"]) == len(stateful.results["metrics"]["test"])
    assert "picture" in {file.name.split("_")[0] for file in logged.glob("files/media/images/*.png")}
    assert [*logged.glob("files/media/html/page_*.html")]
    assert logged.name.endswith((stateful.folder / "wandb" / "id.txt").read_text())
