"""list, disk and prune: the stored runs, the space that they take, and folders that no kept run needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.common.io import PARTIAL, is_locked, lock_of, megabytes, size_of, write_atomically
from trime.errors import UserError
from trime.lab.stage import Stage
from trime.report.results import read_run
from trime.report.run_result import AnsweringRun, RunResult, ScoredRun
from trime.report.tables import TableRows, markdown

NEEDS = "needs.txt"  # in the folder of a run without results: the artefacts that it needs


Runs = dict[Path, RunResult]  # by folder

ORDERS: dict[str, Callable[[Path, RunResult], Any]] = {
    "date": lambda folder, run: run.created or "",
    "name": lambda folder, run: (run.name, run.seed),
    "score": lambda folder, run: score_of(run),
    "size": lambda folder, run: size_of(folder),
}


def score_of(run: RunResult) -> tuple[str, float]:
    """Return the measure of the main result on test, and the result."""
    if isinstance(run, AnsweringRun):
        return f"{run.measure.replace('_', ' ')}, %", 100 * run.share
    assert isinstance(run, ScoredRun)
    return (run.row.metric_name, run.row.value) if run.row.bleu is None else ("BLEU", run.row.bleu)


def stored_runs(config: DictConfig) -> Runs:
    """Return all finished runs in ``paths.outputs``."""
    return {file.parent: read_run(file) for file in sorted(runs_folder(config).glob("*/*/results.json"))}


def needs_of(folder: Path, run: RunResult) -> set[str]:
    """Return the names of the artefacts that a run was made from; UserError if it does not say."""
    if run.made_from is None:
        raise UserError(f"{folder} is of an earlier version and does not say what it was made from: run its command again")
    return {*run.made_from}


def list_runs(config: DictConfig) -> None:
    """Print a table of the finished runs that match: name, date, text, result, size and command."""
    runs = [(folder, run) for folder, run in stored_runs(config).items() if fnmatch(run.name, config.storage.match)]
    lines = []
    for folder, run in sorted(runs, key=lambda item: ORDERS[config.storage.sort](*item)):
        metric, value = score_of(run)
        result = f"{metric} {value:.2f}"
        if isinstance(run, ScoredRun):  # marks of results that cannot be compared with others at a glance
            result += ", fitted mixture" * run.is_fitted + ", smoke test" * run.is_smoke_test
        created = (run.created or "")[:16].replace("T", " ")
        about = [run.name, str(run.seed), created, run.title, result, megabytes(size_of(folder))]
        lines.append([*about, run.command or ""])
    header = ["run", "seed", "created", "text", "result on test", "MB", "command"]
    print(f"\n{markdown(header, lines)}\n{len(runs)} runs in {config.paths.outputs}/runs")


def show_disk(config: DictConfig) -> None:
    """Print how much space is taken by artefacts, by kind with the number of runs that need them, runs and reports."""
    needed = [needs_of(folder, run) for folder, run in stored_runs(config).items()]
    kinds: dict[str, list[Path]] = {}
    for folder in artefact_folders(config):
        kind = "unfinished" if folder.name.endswith(PARTIAL) else folder.name.rpartition("-")[0]
        kinds.setdefault(kind, []).append(folder)
    sizes = {kind: sum(map(size_of, folders)) for kind, folders in kinds.items()}
    lines: TableRows = []
    for kind in sorted(kinds, key=sizes.__getitem__, reverse=True):
        used = sum(any(folder.name in names for names in needed) for folder in kinds[kind])
        lines.append([kind, str(len(kinds[kind])), str(used), megabytes(sizes[kind])])
    outputs = runs_folder(config).parent
    lines += [[name, "", "", megabytes(size_of(outputs / name))] for name in ("runs", "reports", "sweeps")]
    print(f"\n{markdown(['what', 'folders', 'needed by a run', 'MB'], lines)}")
    print("stages=[prune] tells which artefacts no run needs; storage.delete=true deletes them.")


def prune(config: DictConfig) -> None:
    """Print the artefacts and runs that no kept run needs, and with ``storage.delete`` delete them.

    ``storage.keep=all`` keeps every finished run. ``named`` gives up runs that match ``storage.match`` and whose command had no
    ``name=``. ``storage.run`` gives up the runs of one name, with artefacts that no other run needs. Artefacts of unfinished
    runs stay, and those that another process is building; so do those in ``paths.data``, for other outputs may use them, unless
    ``storage.data`` is set. Raises UserError if a kept run does not name its artefacts.
    """
    runs = stored_runs(config)
    given_up = run_folders(config, config.storage.run) if config.storage.run else []
    if config.storage.keep == "named" and not config.storage.run:
        unnamed = {folder: run for folder, run in runs.items() if not any(word.startswith("name=") for word in run.settings)}
        given_up = [folder for folder, run in unnamed.items() if fnmatch(run.name, config.storage.match)]
    kept = [(folder, run) for folder, run in runs.items() if folder not in given_up]
    files = sorted(runs_folder(config).glob(f"*/*/{NEEDS}"))
    unfinished = {file.parent: noted_needs(file.parent) for file in files if file.parent not in given_up}
    needed = {name for folder, run in kept for name in needs_of(folder, run)}.union(*unfinished.values())
    folders = artefact_folders(config, config.storage.data)
    unused = [folder for folder in folders if folder.name.removesuffix(PARTIAL) not in needed and not is_in_use(folder)]
    if config.storage.run:
        theirs = {name for folder in given_up if folder in runs for name in (runs[folder].made_from or [])}
        theirs = theirs.union(*(noted_needs(folder) for folder in given_up))
        unused = [folder for folder in unused if folder.name.removesuffix(PARTIAL) in theirs]
    unused += given_up
    sizes = {folder: size_of(folder) for folder in unused}
    for folder, size in sizes.items():
        print(f"{megabytes(size):>10} MB  {folder}")
        if config.storage.delete:
            shutil.rmtree(folder)
            with suppress(OSError):  # other seeds of the run are there still
                folder.parent.rmdir()
    done = "deleted" if config.storage.delete else "could be deleted (storage.delete=true)"
    print(f"{len(sizes)} folders, {megabytes(sum(sizes.values()))} MB, {done}; {len(kept)} runs are kept")
    for folder in (folder for folder in unfinished if not (folder / "results.json").exists()):
        print(f"what a run without results needs is kept too; to give it up, delete its folder: {folder}")
    if not config.storage.data:
        print(f"{config.paths.data} may be used by other outputs and is left alone (storage.data=true)")


def run_folders(config: DictConfig, name: str) -> list[Path]:
    """Return the folders of the runs of a name, finished or not, or the one of NAME/FOLDER; UserError if there are none."""
    place = runs_folder(config)
    folders = sorted({file.parent for kind in ("results.json", NEEDS) for file in place.glob(f"*/*/{kind}")})
    found = [folder for folder in folders if name in (folder.parent.name, str(folder.relative_to(place)))]
    if not found:
        near = get_close_matches(name, {folder.parent.name for folder in folders}, 1)
        advice = f"is it {near[0]}?" if near else "stages=[list] lists the runs"
        raise UserError(f"storage.run={name}: there is no run of that name in {place}: {advice}")
    return found


def note_needs(folder: Path, names: list[str]) -> None:
    """Write into a run's folder which artefacts it needs, so that they stay while it has no results."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / NEEDS, "\n".join(sorted({*noted_needs(folder), *names})))


def noted_needs(folder: Path) -> list[str]:
    """Return the artefacts that a run's folder notes; none if another process has just finished the run."""
    with suppress(FileNotFoundError):
        return (folder / NEEDS).read_text(encoding="utf-8").split()
    return []


def runs_folder(config: DictConfig) -> Path:
    """Return the folder in which every run has its own, by name and seed."""
    return Path(config.paths.outputs).expanduser() / "runs"


def artefact_folders(config: DictConfig, data: bool = True) -> list[Path]:
    """Return the folders of artefacts, finished or not; with ``data`` also those of text, in ``paths.data``."""
    of_text = [Path(config.paths.data).expanduser() / name for name in ("prepared", "packed") if data]
    places = (*of_text, runs_folder(config).with_name("artefacts"))
    return [path for place in places for path in sorted(place.glob("[!.]*")) if path.is_dir()]


def is_in_use(folder: Path) -> bool:
    """Return True if a process is building an artefact."""
    return is_locked(lock_of(folder.with_name(folder.name.removesuffix(PARTIAL))))


# They import nothing that trains, so that the command line runs them at once.
LIST, DISK, PRUNE = (
    Stage("list", standalone=list_runs),
    Stage("disk", standalone=show_disk),
    Stage("prune", standalone=prune),
)
