"""The report of one run: it keeps what made its results, says what its rows are, and draws what decorates it within minutes."""

from __future__ import annotations

import csv
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NO_PICTURES, Tiny
from tests.helpers.results import made, scored
from tests.helpers.runs import SharedRun
from trime.lab import command_line, tracking
from trime.lab.runner import run
from trime.report.results import read_run, write_results
from trime.report.run_result import ScoredRun
from trime.stages.graph import Graph
from trime.stages.samples import OutOfTimeError, Samples, draw_all, samples_of


def test_a_later_command_does_not_change_what_made_the_results(tiny: Tiny, tmp_path: Path) -> None:
    """It adds its analysis; results of another evaluation have their own provenance."""
    words = ["experiment=trime", "mixture=none", f"paths.outputs={tmp_path}"]
    run(tiny(*words))
    file = Graph(tiny(*words)).run_folder / "results.json"
    earlier = {"created": "2000-01-01T00:00:00+00:00", "command": "python cli.py experiment=trime", "commit": "abc"}
    write_results(file, read_run(file).model_copy(update=earlier))
    run(tiny(*words, "evaluate.analysis=true", "trainer.devices=1"))
    results = read_run(file)
    assert isinstance(results, ScoredRun) and earlier.items() <= results.to_json().items() and results.analysis
    write_results(file, results.model_copy(update={"artefacts": {"evaluate": "another"}}))
    run(tiny(*words))
    assert read_run(file).created > "2020"  # type: ignore[operator]


def test_results_come_before_what_decorates_them(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interruption while passages are drawn leaves a finished run, and the same command completes its page."""
    config = tiny("experiment=trime", "mixture=none", f"paths.outputs={tmp_path}", "report.samples.passages=1")
    folder = Graph(config).run_folder
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Samples, "passage", interrupt)
        run(config)
    assert read_run(folder / "results.json").metrics and (folder / "table.md").exists()
    assert f"results: {folder / 'results.json'}" in capsys.readouterr().out and not (folder / "page.html").exists()
    run(config)
    assert "Test text, scored" in (folder / "page.html").read_text()
    more = ["mixture=none", "report.samples.passages=1", "report.samples.minutes=null"]
    another = samples_of(Graph(tiny("experiment=trime", f"paths.outputs={tmp_path}", *more)))
    assert another is not None
    assert "minutes" not in str(another.identity()), "time decides how many are drawn by a command, not what they are"


def interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


def test_a_logger_that_is_added_later_gets_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has them gets them again only when they have changed, whatever code or host made them."""
    logged: list[tuple[str, float]] = []
    monkeypatch.setattr(tracking, "log_results", lambda logger, results, *report: logged.append((logger, results.row.loss)))

    def log(loss: float, *loggers: str, commit: str = "a") -> None:
        results = scored(made("trime", 0, [loss]) | {"commit": commit})
        tracking.log_once(lambda: [*loggers], [*loggers], tmp_path, results, [], {})  # type: ignore[list-item]

    log(1.0)
    log(1.0, "csv")
    log(1.0, "csv", commit="b")
    log(2.0, "csv")
    assert logged == [("csv", 1.0), ("csv", 2.0)]


@pytest.mark.slow
def test_the_first_table_answers_whether_a_memory_helps(
    session_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``make run``, made tiny: its first line has the plain model, the same memories at test, and training for them."""
    fixed = ["size=tiny", "train.updates=2", "logger=none", "report.samples.passages=0", "evaluate.tokens=1500"]
    places = [f"paths.data={session_folder}/data", f"paths.outputs={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["cli.py", "table=first", "datastore.tokens=5000", *fixed, *places, *NO_PICTURES])
    assert command_line.main() == 0
    rows = {row["run"]: row for row in csv.DictReader((tmp_path / "reports" / "latest" / "table.csv").open())}
    assert {"vanilla", "knn_lm_cache, adaptive", "trime_ext", "trime_ext, adaptive"} <= {*rows}
    printed = capsys.readouterr().out
    (line,) = re.findall(r"^plain ([\d.]+) · with memories at test ([\d.]+) .*", printed, re.MULTILINE)
    assert line[0] == rows["vanilla"]["test perplexity"] and "trained for them" in " ".join(printed.split())
    assert line[1] in {row["test perplexity"] for name, row in rows.items() if name.startswith("knn_lm_cache")}


def test_every_scored_token_is_written(language: SharedRun) -> None:
    """Its parts sum to its probability, weights to one, and log-probabilities to the loss."""
    graph, file = language.graph, language.folder / "tokens.jsonl"
    assert file.name in language.printed and file.name in (language.folder / "page.html").read_text()
    assert "-m experiment=vanilla,knn_lm_cache," in " ".join(language.printed.split()), "without its memories it is no baseline"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    row = language.results["metrics"]["test"][-1]
    assert len(lines) == row["tokens"]
    assert -sum(line["log_probability"] for line in lines) / len(lines) == pytest.approx(row["loss"], abs=1e-5)
    for line in lines:
        assert sum(line["parts"].values()) == pytest.approx(math.exp(line["log_probability"]), abs=1e-5)
        assert min(line["parts"].values()) > -1e-5 and sum(line["weights"].values()) == pytest.approx(1, abs=1e-5)
    corpus, line = graph.evaluated_corpus.corpus(), lines[len(lines) // 2]
    text, names = corpus.split("test"), corpus.names("test")
    first = text.offsets[names.index(line["document"])]
    assert corpus.vocabulary.symbols[int(text.tokens[first + line["position"]])] == line["token"]


class Drawn:
    """Samples that take a minute each, on a clock of their own."""

    def __init__(self) -> None:
        self.seconds, self.numbers = 0.0, list[int]()

    def draw(self, number: int) -> dict[str, Any]:
        self.seconds += 60
        self.numbers.append(number)
        return {"number": number}

    def all(self, count: int, folder: Path, minutes: float | None) -> list[dict[str, Any]]:
        return draw_all([partial(self.draw, number) for number in range(count)], folder, minutes, lambda: self.seconds)


def test_as_many_are_drawn_as_fit_and_the_same_command_draws_more(tmp_path: Path) -> None:
    drawn, every = Drawn(), [{"number": number} for number in range(5)]
    with pytest.raises(OutOfTimeError, match=r"2 of 5 .*report\.samples.minutes=null") as stopped:
        drawn.all(5, tmp_path, 2.5)
    assert stopped.value.samples == every[:2] and drawn.seconds == 120
    with pytest.raises(OutOfTimeError):
        drawn.all(5, tmp_path, 0.1)
    assert drawn.numbers == [0, 1, 2], "at least one each time, and none twice"
    assert drawn.all(5, tmp_path, None) == every and drawn.numbers == [0, 1, 2, 3, 4]


def test_what_was_drawn_before_an_interruption_is_not_drawn_again(tmp_path: Path) -> None:
    drawn = Drawn()
    with pytest.raises(KeyboardInterrupt):
        draw_all([partial(drawn.draw, 0), interrupt], tmp_path, 60, lambda: 0.0)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == {"number": 0}
    assert len(drawn.all(2, tmp_path, 60)) == 2 and drawn.numbers == [0, 1]
