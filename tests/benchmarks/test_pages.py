"""The pages are what templates and kept results make of them; a session on a borrowed device goes on where it was."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from benchmarks.on_device import Step, run_steps
from benchmarks.pages import RESULTS, TEMPLATES, Folder, pages


def test_writing_the_pages_again_changes_nothing() -> None:
    written = pages()
    names = {path.name for path in written if path.parent.name != "findings"}
    own = {"README.md", "decoder-memory.md", "reading-a-report.md", "results.md", "speed.md", "sizing.md"}
    assert names == own and len(written) > len(own)
    changed = [path.name for path, page in written.items() if path.read_text(encoding="utf-8") != page]
    assert not changed, f"{', '.join(changed)}: edit docs/templates and run make pages"


@pytest.mark.parametrize("template", sorted(TEMPLATES.rglob("*.md")), ids=lambda path: path.name)
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


def test_kept_results_name_the_code_or_the_commit_that_recorded_them() -> None:
    for path in RESULTS.rglob("*.json"):
        kept = json.loads(path.read_text())
        assert kept["commit"] or kept["recorded_in"], path


def test_steps_go_on_where_they_were(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def step(name: str, code: str, resumes: bool = False) -> Step:
        return Step(name, [sys.executable, "-c", code], resumes)

    file, long = tmp_path / "results" / "steps.json", "import time; time.sleep(60)"
    planned = [step("good", "print('good ran')"), step("bad", "raise SystemExit(2)"), step("long", long, resumes=True)]
    assert run_steps(planned, time.monotonic() + 3, file) == 1
    states = {name: result["state"] for name, result in json.loads(file.read_text())["steps"].items()}
    assert states == {"good": "done", "bad": "failed", "long": "to be continued"}
    assert "| long | to be continued |" in capfd.readouterr().out.replace("  ", " ")
    mended = [*planned[:1], step("bad", "print('mended ran')"), step("long", "print('the rest ran')", resumes=True)]
    assert run_steps(mended, time.monotonic() + 60, file) == 0
    out = capfd.readouterr().out
    assert "mended ran" in out and "the rest ran" in out and "good ran\n" not in out
