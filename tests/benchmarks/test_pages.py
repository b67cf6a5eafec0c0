"""The pages are what their templates and the kept results make of them, and a wrong name in a template is an error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.pages import RESULTS, TEMPLATES, Folder, digits, entry, pages, published, short
from trime.report.bootstrap import Difference


def test_writing_the_pages_again_changes_nothing() -> None:
    written = pages()
    assert {path.name for path in written} == {"README.md", "results.md", "speed.md", "sizing.md"}
    changed = [path.name for path, page in written.items() if path.read_text(encoding="utf-8") != page]
    assert not changed, f"{', '.join(changed)}: edit docs/templates and run make pages"


@pytest.mark.parametrize("template", sorted(TEMPLATES.glob("*.md")), ids=lambda path: path.name)
def test_no_number_of_a_table_is_typed(template: Path) -> None:
    for line in template.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            assert not re.search(r"\d\.\d", re.sub(r"\{\{.*?\}\}|\{%.*?%\}|`[^`]*`", "", line)), line


def test_a_page_prints_the_mean_over_seeds_and_the_papers_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.pages.RESULTS", tmp_path)
    for seed, loss in enumerate([3.0, 4.0]):
        rows = [{"memories": "", "mixture": "joint", "loss": x, "perplexity": 0.0, "tokens": 7} for x in (9.0, loss, 1.0)]
        rows[-1] |= {"mixture": "adaptive", "fitted": {}}
        run = {"name": "trime", "seed": seed, "train": {"updates": 100 + 100 * seed}, "metrics": {"valid": rows, "test": rows}}
        (tmp_path / f"trime-seed{seed}-ab.json").write_text(json.dumps(run))
    assert Folder("")("trime")["row.loss"] == 3.5 and Folder("")("trime").adaptive["row.loss"] == 1.0
    assert Folder("")("trime").row(0)["row.loss"] == 9.0 and Folder("")("trime")["train.updates"] == 150
    with pytest.raises(LookupError, match="gone"):
        Folder("")("gone")


def test_a_name_that_no_source_has_is_an_error() -> None:
    assert published("paper 7M", "trime") and published("paper 7M", "no row") is None
    with pytest.raises(LookupError):
        published("no paper", "trime")
    with pytest.raises(LookupError, match="0 rows of cache"):
        entry("cache", what="nothing")


def test_numbers_as_pages_print_them() -> None:
    assert [digits(1234.567), digits(1000), digits(-0.5, 1), digits(None)] == ["1,234.57", "1,000", "−0.5", ""]
    assert digits(Difference(-1, -2, 0.5, 20)) == "−1.00 [−2.00, +0.50], no difference shown"
    assert [short(950), short(60_000), short(1_501_392), short(1e9)] == ["950", "60k", "1.5M", "1B"]


def test_kept_results_name_the_code_or_the_commit_that_recorded_them() -> None:
    for path in RESULTS.rglob("*.json"):
        kept = json.loads(path.read_text())
        assert kept["commit"] or kept["recorded_in"], path
