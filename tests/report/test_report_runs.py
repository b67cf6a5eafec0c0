"""Reports of several runs: texts stay apart, folders are not overwritten, nothing stale stays beside a new page."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.results import answered, made, scored
from trime.report.comparison import compare_runs, joined_table
from trime.report.report_runs import report_folder, report_several, writing_report
from trime.report.results import keep_results
from trime.report.run_result import run_from_json

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
