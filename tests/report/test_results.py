"""Results say whether they are as they were written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.helpers.results import made
from trime.errors import UserError
from trime.report.results import CHECKSUM, distinct_runs, find_runs, keep_results, read_run, write_results
from trime.report.run_result import run_from_json

RESULTS = made("trime", 3, [2.5]) | {"field of another version": {"8": 1.1}}


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Whatever their layout; also after they were read and written again, and without a checksum, as older versions wrote."""
    file = tmp_path / "results.json"
    write_results(file, run_from_json(RESULTS))
    read = read_run(file)
    assert json.loads(json.dumps(read.to_json())) == RESULTS and CHECKSUM in json.loads(file.read_text())
    file.write_text(json.dumps(json.loads(file.read_text())))
    assert read_run(file) == read
    write_results(file, read)
    assert read_run(file) == read
    file.write_text(json.dumps(RESULTS))
    assert read_run(file) == read


def test_kept_results_of_every_version_are_read_without_loss() -> None:
    lines = [line for file in (ROOT / "benchmarks" / "results").rglob("*.jsonl") for line in file.read_text().splitlines()]
    contents = [json.loads(line)["results"] for line in lines]
    contents += [json.loads(file.read_text()) for file in (ROOT / "docs").rglob("results.json")]
    assert len(contents) > 300
    for content in contents:
        assert json.loads(json.dumps(run_from_json(content).to_json())) == content


CHANGES = [("1.1", "1.2"), ("2.5", "2.6"), ("trime", "knn"), ('"seed": 3', '"seed": 4'), ("null", '"7"')]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_changed_results_are_refused(old: str, new: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    write_results(file, run_from_json(RESULTS))
    changed = file.read_text().replace(old, new, 1)
    assert changed != file.read_text()
    file.write_text(changed)
    with pytest.raises(UserError, match="was changed after it was written"):
        read_run(file)


def write_run(folder: Path, name: str, seed: int = 0, loss: float = 4.0) -> Path:
    """Write the results of a run as its folder holds them; return the folder."""
    folder.mkdir(parents=True)
    results = made(name, seed, [loss] * 12) | {"commit": "abc", "command": f"python cli.py experiment={name}"}
    results |= {"config_hash": "same", "artefacts": {"fit": str(folder)}}
    write_results(folder / "results.json", run_from_json(results))
    return folder


def test_results_are_found_wherever_they_were_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By folder, file or pattern, whatever the folder's name; files of another form are named."""
    run = write_run(tmp_path / "runs" / "a" / "1234", "a")
    (run / "audit.json").write_text("{}")
    keep_results([read_run(run / "results.json")], tmp_path / "passkey")
    (kept,) = (tmp_path / "passkey").iterdir()
    capsys.readouterr()
    patterns = "runs runs/a runs/*/* runs/** runs/a/1234/results.json passkey passkey/*"
    for pattern in (*patterns.split(), f"*/{kept.name}"):
        (found,) = find_runs([str(tmp_path / pattern)])
        assert found.name == "a"
    assert not capsys.readouterr().out
    (tmp_path / "passkey" / "speed.json").write_text("[1]")
    assert len(find_runs([str(tmp_path / "passkey")])) == 1 and "speed.json" in capsys.readouterr().out
    find_runs([str(tmp_path / "passkey" / "*"), str(tmp_path / "absent")])
    assert "absent matches no results" in capsys.readouterr().out
    campaign = tmp_path / "kept.jsonl"
    campaign.write_text(json.dumps({"name": "a", "results": json.loads(kept.read_text())}) + "\n")
    (found,) = find_runs([str(campaign)])
    assert found.name == "a"
    find_runs([str(campaign), str(tmp_path / "absent")])
    assert "absent matches no results" in capsys.readouterr().out
    campaign.write_text(campaign.read_text()[:-20])
    with pytest.raises(UserError, match=r"kept\.jsonl is truncated"):
        find_runs([str(campaign)])
    kept.write_text(kept.read_text()[:-20])
    with pytest.raises(UserError, match=f"{kept.name} is truncated"):
        find_runs([str(tmp_path / "passkey")])


def test_one_observation_is_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies, kept results and links are the run itself, and so are another name or a seed that changed nothing."""
    run = write_run(tmp_path / "a", "a")
    shutil.copytree(run, tmp_path / "backup_of_a")
    (tmp_path / "link").symlink_to(run)
    keep_results([read_run(run / "results.json")], tmp_path / "kept")
    write_run(tmp_path / "b", "b")
    write_run(tmp_path / "untrained", "a", seed=1)
    write_run(tmp_path / "other", "a", seed=2, loss=4.5)
    capsys.readouterr()
    distinct = distinct_runs(find_runs([str(tmp_path)]))
    assert [(run.name, run.seed) for run in distinct] == [("a", 0), ("a", 2)]
    (line,) = capsys.readouterr().out.splitlines()
    assert "counted once" in line and "b seed 0 (of a seed 0)" in line and "a seed 1 (of a seed 0)" in line
