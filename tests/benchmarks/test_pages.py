"""The pages are what templates and kept results make of them; a session on a borrowed device goes on where it was."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.kept import keep, kept_in
from benchmarks.older import changes_since, rooms_of
from benchmarks.on_device import Step, main, run_steps
from benchmarks.pages import RESULTS, TEMPLATES, Folder, benchmark, pages
from benchmarks.parcels import cut, join
from benchmarks.pictures import FOLDER, PICTURES
from tests.conftest import composed
from trime.errors import UserError
from trime.report.results import run_of


def test_writing_the_pages_again_changes_nothing() -> None:
    written = pages()
    names = {path.name for path in written if path.parent.name not in ("findings", "results")}
    own = "README decoder-memory reading-a-report reproduce results settings speed sizing"
    assert names == {f"{name}.md" for name in own.split(" ")} and len(written) > len(names)
    changed = [path.name for path, page in written.items() if path.read_text(encoding="utf-8") != page]
    assert not changed, f"{', '.join(changed)}: edit docs/templates and run make pages"


@pytest.mark.parametrize("template", sorted(TEMPLATES.rglob("*.md")), ids=lambda path: path.name)
def test_no_number_of_a_table_is_typed(template: Path) -> None:
    for line in template.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            assert not re.search(r"\d\.\d", re.sub(r"\{\{.*?\}\}|\{%.*?%\}|`[^`]*`", "", line)), line


def test_the_name_of_the_readme_is_one_that_memory_alone_knows() -> None:
    """What README says of its picture: the model alone does not expect the name, with memory it does, from a line."""
    row = benchmark("newer_name")["rows"][0]
    assert row["alone"] < 1e-6 and row["with memory"] > 0.1 and re.search(r"\.py, line \d+$", row["source"])
    assert "".join(row["tokens"]).strip() == row["name"]
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"the name `{row['name']}`" in readme and "SpanKind" not in readme


def test_a_page_prints_the_mean_over_seeds_and_the_papers_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.pages.RESULTS", tmp_path)
    (tmp_path / "kept").mkdir()
    for seed, loss in enumerate([3.0, 4.0]):
        rows = [{"memories": "", "mixture": "joint", "loss": x, "perplexity": 0.0, "tokens": 7} for x in (9.0, loss, 1.0)]
        rows[-1] |= {"mixture": "adaptive", "fitted": {}}
        run = {"name": "trime", "seed": seed, "train": {"updates": 100 + 100 * seed}, "metrics": {"valid": rows, "test": rows}}
        (tmp_path / "kept" / f"trime-seed{seed}-ab.json").write_text(json.dumps(run))
    assert keep(tmp_path / "kept", tmp_path / "campaign.jsonl") == 2
    campaign = Folder("campaign")
    assert campaign("trime")["row.loss"] == 3.5 and campaign("trime").adaptive["row.loss"] == 1.0
    assert campaign("trime").row(0)["row.loss"] == 9.0 and campaign("trime")["train.updates"] == 150
    with pytest.raises(LookupError, match="gone"):
        campaign("gone")
    (tmp_path / "kept" / "trime-seed1-ab.json").unlink()
    assert keep(tmp_path / "kept", tmp_path / "campaign.jsonl") == 2, "what is there stays"


def test_kept_results_name_the_code_or_the_commit_that_recorded_them() -> None:
    for path in RESULTS.rglob("*.json*"):
        contents = kept_in(path) if path.suffix == ".jsonl" else {"": json.loads(path.read_text())}
        for name, kept in contents.items():
            assert kept["commit"] or kept["recorded_in"], (path, name)


def test_steps_go_on_where_they_were(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.on_device.LEAST", 0.5)

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
    assert run_steps(planned[:1], time.monotonic() + 60, file, ["good"]) == 0 and "good ran\n" in capfd.readouterr().out


def test_a_step_that_resumes_is_called_until_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has its own deadline, and no step begins that has no time."""
    monkeypatch.setattr("benchmarks.on_device.LONGEST", 3)
    monkeypatch.setattr("benchmarks.on_device.LEAST", 0.5)
    count = "from pathlib import Path; import time; p = Path('{}'); p.write_text(p.read_text() + '.' if p.exists() else '.')"
    code = count.format(tmp_path / "calls") + "; time.sleep(60 * (len(p.read_text()) < 3))"
    step = Step("long", [sys.executable, "-c", code], resumes=True)
    assert run_steps([step], time.monotonic() + 60, tmp_path / "steps.json") == 0
    (end,) = json.loads((tmp_path / "steps.json").read_text())["steps"].values()
    assert end["state"] == "done" and (tmp_path / "calls").read_text() == "..." and end["seconds"] >= 6
    run_steps([step._replace(name="late")], time.monotonic() + 0.1, tmp_path / "steps.json")
    assert (tmp_path / "calls").read_text() == "..."


def test_every_step_on_a_device_is_a_command_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, planned = argparse.Namespace(), list[Step]()
    monkeypatch.setattr("benchmarks.on_device.run_steps", lambda steps, *_: planned.extend(steps) or 0)
    assert main(["--text", str(tmp_path), "--model", "DIR", "--accelerator", "cpu"]) == 0 and planned
    for step in planned:
        if "cli.py" in step.words:
            composed(*step.words[2:])
        elif "benchmarks" in step.words:
            name = step.words[3]
            parser = argparse.ArgumentParser()
            for option in ("--json", "--device"):
                parser.add_argument(option)
            import_module(f"benchmarks.{name}").add_arguments(parser)
            parser.parse_args(step.words[4:], parsed)


def test_a_folder_is_carried_in_parcels(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "inner").mkdir(parents=True)
    (model / "weights").write_bytes(bytes(range(256)) * 5)
    (model / "inner" / "empty").write_bytes(b"")
    cut(model, tmp_path / "parcels", 500)
    assert len([*(tmp_path / "parcels").glob("*.bin")]) == 3
    join(tmp_path / "parcels", tmp_path / "there")
    assert (tmp_path / "there" / "weights").read_bytes() == bytes(range(256)) * 5
    assert (tmp_path / "there" / "inner" / "empty").is_file()
    (tmp_path / "parcels" / "001.bin").write_bytes(b"?")
    with pytest.raises(UserError, match=r"001\.bin is damaged"):
        join(tmp_path / "parcels", tmp_path / "again")
    (tmp_path / "parcels" / "001.bin").unlink()
    with pytest.raises(UserError, match="not there yet"):
        join(tmp_path / "parcels", tmp_path / "again")


def test_kept_results_are_as_they_were_written() -> None:
    """Whoever takes a path out of one writes its checksum again, so that report.runs= reads it."""
    files = [*RESULTS.rglob("*.jsonl")]
    assert len(files) > 15
    for path in files:
        for content in kept_in(path).values():
            run_of(content, path)


def test_results_older_than_their_code_are_named() -> None:
    """By the rooms that a benchmark imports from; a commit that is not here is told apart from one without changes."""
    assert "trime/models/pretrained" in rooms_of("attendre")
    assert changes_since("0" * 40, ["trime"]) is None
    assert changes_since("HEAD", rooms_of("attendre")) == []


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_and_shown(name: str, tmp_path: Path) -> None:
    PICTURES[name](tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000 and (FOLDER / f"{name}.png").is_file()
    assert any(f"]({name}.png)" in page.read_text() for page in FOLDER.glob("*.md"))
