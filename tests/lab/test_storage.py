"""list, disk and prune: runs are listed, and what a kept run needs stays."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock
from omegaconf import DictConfig

from tests.conftest import ROOT, Tiny
from trime.errors import UserError
from trime.lab.runner import run
from trime.lab.storage import NEEDS, artefact_folders
from trime.report.results import read_run, write_results


@pytest.fixture(scope="module")
def two_runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data and outputs of two runs that share a model."""
    folder = tmp_path_factory.mktemp("two_runs")
    for experiment in ("vanilla", "cache"):
        run(compose_in(tiny, folder, f"experiment={experiment}"))
    return folder


@pytest.fixture()
def outputs(tiny: Tiny, two_runs: Path, tmp_path: Path) -> Tiny:
    """Return a function that composes a command on a copy of the two runs."""
    folder = tmp_path / "copy"
    shutil.copytree(two_runs, folder, symlinks=True)
    return partial(compose_in, tiny, folder)


def compose_in(tiny: Tiny, folder: Path, *words: str) -> DictConfig:
    """Return a command on outputs in a folder."""
    return tiny(*words, "mixture=none", "dataset.modules=20", f"paths.outputs={folder}/outputs", f"paths.data={folder}/data")


def test_finished_runs_are_listed(outputs: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    run(outputs("stages=[list]", "storage.sort=score"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "stdlib" in line]
    assert len(lines) == 2 and all("perplexity" in line and line.count("20") for line in lines)
    assert all("smoke test" in line for line in lines)
    run(outputs("stages=[list]", "storage.match=van*"))
    shown = capsys.readouterr().out
    assert "vanilla" in shown and "cache" not in shown.partition("\n1 runs")[0] and "1 runs" in shown


def test_prune_deletes_what_no_run_needs_and_only_when_told(outputs: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """Artefacts of finished runs stay, also after a report alone; what is being built stays; the runs still work."""
    config = outputs("stages=[prune]")
    folders = artefact_folders(config)
    place = Path(config.paths.outputs) / "artefacts"
    for name in ("fit-0.partial", "fit-1.partial", "tune-2"):
        (place / name).mkdir()
        (place / name / "file").write_text("content")
    run(outputs("experiment=cache", "stages=[report]"))
    with FileLock(place / ".fit-1.lock"):
        capsys.readouterr()
        run(config)
        shown = capsys.readouterr().out
        assert "fit-0.partial" in shown and "tune-2" in shown and "fit-1" not in shown and "2 folders" in shown
        assert (place / "tune-2").is_dir()
        run(outputs("stages=[prune]", "storage.delete=true"))
    assert {*artefact_folders(config)} == {*folders, place / "fit-1.partial"}
    capsys.readouterr()
    run(outputs("experiment=cache"))
    assert "made" not in capsys.readouterr().out


def test_unnamed_runs_may_go(outputs: Tiny) -> None:
    """With storage.keep=named runs without name= on their command go, with what they alone need."""
    config = outputs("stages=[prune]", "storage.keep=named", "storage.delete=true")
    (file,) = Path(config.paths.outputs).glob("runs/cache/*/results.json")
    write_results(file, read_run(file).model_copy(update={"overrides": ["experiment=cache", "name=cache"]}))
    run(config)
    assert [path.name for path in Path(config.paths.outputs).glob("runs/*/*")] == [file.parent.name]
    run(outputs("experiment=cache", "stages=[evaluate,report]"))


def test_runs_that_do_not_match_stay(outputs: Tiny) -> None:
    """storage.match limits what may be deleted: the artefacts of other runs stay, and those that they share."""
    config = outputs("stages=[prune]", "storage.match=cache", "storage.keep=named", "storage.delete=true", "storage.data=true")
    before = {folder.name for folder in artefact_folders(config)}
    (file,) = Path(config.paths.outputs).glob("runs/vanilla/*/results.json")
    run(config)
    after = {folder.name for folder in artefact_folders(config)}
    assert [path.name for path in Path(config.paths.outputs).glob("runs/*/*")] == [file.parent.name]
    assert after == {*read_run(file).made_from} and after < before


def test_what_unfinished_runs_need_stays(outputs: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """Also what a killed training has written so far; a run that is finished no longer needs the note."""
    config = outputs("stages=[prune]", "storage.delete=true", "storage.data=true")
    (note,) = [file.with_name(NEEDS) for file in Path(config.paths.outputs).glob("runs/cache/*/results.json")]
    assert not note.exists()
    run(outputs("experiment=trime", "stages=[prepare,fit]"))
    (unfinished,) = Path(config.paths.outputs).glob(f"runs/trime/*/{NEEDS}")
    fit = next(name for name in unfinished.read_text().split() if name.startswith("fit-"))
    place = Path(config.paths.outputs) / "artefacts"
    (place / fit).rename(place / f"{fit}.partial")  # as if it had been killed
    folders = artefact_folders(config)
    capsys.readouterr()
    run(config)
    assert artefact_folders(config) == folders and str(unfinished.parent) in capsys.readouterr().out
    shutil.rmtree(unfinished.parent)
    run(config)
    assert not (place / f"{fit}.partial").exists()


def test_one_run_is_deleted_by_its_name(outputs: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """What another run uses stays, and what no run needed before; a name that matches nothing is refused."""
    config = outputs("stages=[prune]", "storage.run=cache")
    place = Path(config.paths.outputs)
    (place / "artefacts" / "tune-2").mkdir()
    theirs = {*place.glob("runs/cache/*")}
    needs = {name: {*read_run(next(place.glob(f"runs/{name}/*/results.json"))).made_from} for name in ("vanilla", "cache")}
    capsys.readouterr()
    run(config)
    assert "could be deleted" in capsys.readouterr().out and all(folder.is_dir() for folder in theirs)
    for wrong in ("cach", "cache*", "nothing_like_it"):
        with pytest.raises(UserError, match=r"storage\.run=.*there is no run of that name"):
            run(outputs("stages=[prune]", f"storage.run='{wrong}'", "storage.delete=true"))
    run(outputs("stages=[prune]", "storage.run=cache", "storage.delete=true"))
    left = {folder.name for folder in artefact_folders(config)}
    assert [folder.name for folder in place.glob("runs/*")] == ["vanilla"]
    assert needs["vanilla"] <= left and "tune-2" in left and not (needs["cache"] - needs["vanilla"]) & left - needs["vanilla"]
    (unfinished := place / "runs" / "half" / "0-1").mkdir(parents=True)
    (unfinished / NEEDS).write_text("tune-2")
    run(outputs("stages=[prune]", "storage.run=half/0-1", "storage.delete=true"))
    assert not unfinished.parent.exists() and "tune-2" not in {folder.name for folder in artefact_folders(config)}
    run(outputs("experiment=vanilla"))


def test_a_list_of_runs_imports_nothing_that_trains(two_runs: Path) -> None:
    """It takes a second of processor time, most of them for the composition of the command."""
    code = (
        "import sys; from trime.lab.command_line import main; status = main();"
        "assert not {'torch', 'pytorch_lightning', 'matplotlib.pyplot'} & {*sys.modules}, 'heavy'; sys.exit(status)"
    )
    words = ["stages=[list]", f"paths.outputs={two_runs}/outputs"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "2 runs in" in done.stdout, done.stderr
