"""Results say whether they are as they were written; in reports of several runs texts stay apart, and nothing stale stays."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.helpers.results import answered, made, scored
from trime.errors import UserError
from trime.report.comparison import compare_runs, joined_table
from trime.report.report_runs import report_folder, report_several, writing_report
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


PUBLISHED = {"a paper": {"a": [50.0], "b": [40.0]}}


def on(text: dict[str, Any], name: str, loss: float) -> dict[str, Any]:
    """Return a run on a text."""
    run = made(name, 0, [loss] * 12) | {"dataset": {"name": "text", "fingerprint": "f1", "vocabulary": 10} | text}
    run["metrics"]["valid"][0]["by_memory_size"] = {}
    return run | {"command": f"python cli.py experiment={name} dataset.path=/home/me/text", "commit": "abc"}


def configured(**settings: Any) -> Any:
    """Return the section ``report``."""
    return OmegaConf.create({"against": "a", "published": PUBLISHED, "show_published": "auto", "figures": {}} | settings)


TEXTS = [{}, {"name": "another"}, {"fingerprint": "f2"}, {"vocabulary": 11}, {"test_hash": "of other pieces"}]


def test_runs_on_different_texts_share_no_table(tmp_path: Path) -> None:
    """Another name, content, vocabulary or tokenisation is another text, and so is another scored part."""
    runs = [on(text, name, 4.0) for text in TEXTS for name in ("a", "b")]
    part = [on({}, name, 4.0) | {"sample": "starts"} for name in ("a", "b")]
    results = [scored(run) for run in (*runs, *part)]
    texts, titles = {run.text for run in results}, {run.title for run in results}
    config = OmegaConf.create({"paths": {"outputs": str(tmp_path)}, "report": {"name": "x", "keep": None}})
    config.report = OmegaConf.merge(config.report, configured())
    report_several(config, results, "python cli.py -m experiment=a,b")
    table = (tmp_path / "reports" / "latest" / "table.md").read_text()
    assert table.count("\n| run ") == table.count("## ") == len(texts)
    page = (tmp_path / "reports" / "latest" / "page.html").read_text()
    assert "<pre>python cli.py -m experiment=a,b</pre>" in page and "The first made this report" in page
    lines = [*csv.DictReader((tmp_path / "reports" / "latest" / "table.csv").open())]
    assert len(lines) == 2 * len(texts) and {line["text"] for line in lines} == titles


@pytest.mark.parametrize(
    ("own", "asked", "shown"), [(False, "auto", True), (True, "auto", False), (True, "always", True), (False, "never", False)]
)
def test_published_results_do_not_stand_beside_ones_own_text(own: bool, asked: str, shown: bool) -> None:
    runs = [on({"own": own}, name, loss) for name, loss in (("a", 4.0), ("b", 3.0))]
    comparison = compare_runs([*map(scored, runs)], configured(show_published=asked))
    assert ("a paper*" in comparison.table.header) == bool(comparison.order.lines) == shown
    assert joined_table([comparison]).header[0] == "text"


def test_each_set_of_runs_has_its_folder_and_the_link_is_to_the_latest(tmp_path: Path) -> None:
    one, two = ([scored(made(name, 0, [4.0])) for name in names] for names in ("a", "ab"))
    folders = [report_folder(tmp_path, "comparison", runs) for runs in (one, two, [*reversed(two)])]
    assert folders[0] != folders[1] == folders[2]
    for folder in folders[:2]:
        with writing_report(folder):
            (folder / "page.html").write_text("new")
        assert (tmp_path / "latest").resolve() == folder.resolve()


def test_nothing_stale_stays_beside_a_new_page(tmp_path: Path) -> None:
    folder = tmp_path / "comparison"
    folder.mkdir()
    for name in ("page.html", "policies.png"):
        (folder / name).write_text("old")
    with writing_report(folder):
        (folder / "page.html").write_text("new")

    assert [path.name for path in folder.iterdir()] == ["page.html"]


def test_kept_results_name_no_places(tmp_path: Path) -> None:
    keep_results([scored(on({"path": "/home/me/text"}, "a", 4.0))], tmp_path)
    (file,) = tmp_path.iterdir()
    assert "/home/me" not in file.read_text()


def test_results_of_other_texts_are_kept_beside_one_another(tmp_path: Path) -> None:
    """Their settings are the same words, paths apart; what is kept again replaces itself."""
    index = {"entries": 10, "index": "exact", "recall": 1.0, "split": "train", "dataset": "folder"}
    stores = [on({}, "a", 4.0) | {"datastore": index | {"text": text}} for text in ("aaaa", "bbbb")]
    asked = [answered("fifo", 8, 0.5) | {"questions_text": text} for text in ("cccc", "dddd")]
    for _ in range(2):
        keep_results([*map(run_from_json, (*stores, *asked))], tmp_path)
    assert len([*tmp_path.iterdir()]) == 4
    keep_results([scored(on({}, "a", 4.0))], tmp_path)  # as an earlier version has it, without the texts
    assert len([*tmp_path.iterdir()]) == 4
