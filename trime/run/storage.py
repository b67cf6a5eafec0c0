"""list, disk and prune: which runs there are, what takes how much space, and what no kept run needs."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.errors import UserError
from trime.io import PARTIAL, is_locked, lock_of, megabytes, size_of, write_atomically
from trime.places import Place
from trime.report.answers import counted
from trime.report.groups import is_fitted
from trime.report.results import read_run
from trime.report.tables import TableRows, markdown, metric_name, metric_value
from trime.report.texts import evaluated_text, is_smoke_test
from trime.run.results_at_url import download_all_results, upload_results

NEEDS = "needs.txt"  # in the folder of a run without results: the artefacts that it needs


@dataclass(eq=False)
class StoredRun:
    """A finished run: the folder with its results.json, and what that holds."""

    folder: Path
    results: dict[str, Any]

    @cached_property
    def size(self) -> int:
        """The bytes of its own files, without its artefacts."""
        return size_of(self.folder)

    @property
    def is_named(self) -> bool:
        """Return True if its command gave it a name."""
        return any(word.startswith("name=") for word in shlex.split(self.results.get("command") or ""))

    @property
    def score(self) -> tuple[str, float]:
        """Return the measure of its main result on test, and the result."""
        if "questions" in self.results:
            measure, share = counted(self.results)
            return f"{measure}, %", 100 * share
        row = self.results["metrics"]["test"][-1]
        return ("BLEU", row["bleu"]) if "bleu" in row else (metric_name(row), metric_value(row))

    @property
    def marks(self) -> list[str]:
        """Return what keeps its result from being compared with others at a glance: a fitted mixture, too few tokens."""
        if "questions" in self.results:
            return []
        fitted = ["fitted mixture"] * is_fitted(self.results)
        return [*fitted, *["smoke test"] * is_smoke_test(self.results)]

    @property
    def text(self) -> str:
        """Return the title of the text that it was evaluated on."""
        return "questions" if "questions" in self.results else evaluated_text(self.results).title


ORDERS: dict[str, Callable[[StoredRun], Any]] = {
    "date": lambda run: str(run.results.get("created", "")),
    "name": lambda run: (run.results["name"], run.results["seed"]),
    "score": lambda run: run.score,
    "size": lambda run: run.size,
}


def stored_runs(config: DictConfig) -> list[StoredRun]:
    """Return all finished runs in ``paths.outputs``."""
    files = sorted(runs_folder(config).glob("*/*/results.json"))
    return [StoredRun(file.parent, read_run(file)) for file in files]


def matches(run: StoredRun, config: DictConfig) -> bool:
    """Return True if the name of a run matches ``storage.match``."""
    return fnmatch(run.results["name"], config.storage.match)


def list_runs(config: DictConfig) -> None:
    """Print a table of the finished runs that match: name, date, text, result, size and command."""
    runs = sorted((run for run in stored_runs(config) if matches(run, config)), key=ORDERS[config.storage.sort])
    header = ["run", "seed", "created", "text", "result on test", "MB", "command"]
    print(f"\n{markdown(header, [run_line(run) for run in runs])}\n{len(runs)} runs in {config.paths.outputs}/runs")


def run_line(run: StoredRun) -> list[str]:
    """Return a run's line of the list."""
    (metric, value), results = run.score, run.results
    created = str(results.get("created", ""))[:16].replace("T", " ")
    result = ", ".join([f"{metric} {value:.2f}", *run.marks])
    cells = [results["name"], str(results["seed"]), created, run.text, result, megabytes(run.size)]
    return [*cells, results.get("command") or ""]


def show_disk(config: DictConfig) -> None:
    """Print what takes how much space: artefacts by kind with the number of runs that need them, runs, and reports."""
    needed = [needs_of(run) for run in stored_runs(config)]
    kinds: dict[str, list[Path]] = {}
    for folder in artefact_folders(config):
        kind = "unfinished" if folder.name.endswith(PARTIAL) else folder.name.rpartition("-")[0]
        kinds.setdefault(kind, []).append(folder)
    sizes = {kind: sum(map(size_of, folders)) for kind, folders in kinds.items()}
    lines: TableRows = []
    for kind in sorted(kinds, key=sizes.__getitem__, reverse=True):
        used = sum(any(folder.name in names for names in needed) for folder in kinds[kind])
        lines.append([kind, str(len(kinds[kind])), str(used), megabytes(sizes[kind])])
    outputs = Place(config.paths.outputs).local
    lines += [[name, "", "", megabytes(size_of(outputs / name))] for name in ("runs", "reports", "sweeps")]
    print(f"\n{markdown(['what', 'folders', 'needed by a run', 'MB'], lines)}")
    print("stages=[prune] tells which artefacts no run needs; storage.delete=true deletes them.")


def prune(config: DictConfig) -> None:
    """Print what no kept run needs, artefacts and runs, and with ``storage.delete`` delete it.

    ``storage.keep=all`` keeps every finished run. ``named`` gives up runs that match ``storage.match`` and whose command had no
    ``name=``. ``storage.run`` gives up the runs of one name, with what they alone need. What unfinished runs need stays, and
    what another process is building; so does what lies in ``paths.data``, for other outputs may use it, unless
    ``storage.data`` is set. Raises UserError if a kept run does not say what it was made from.
    """
    runs = stored_runs(config)
    if config.storage.run:
        given_up = run_folders(config, config.storage.run)
    else:
        given_up = [run.folder for run in runs if config.storage.keep == "named" and matches(run, config) and not run.is_named]
    kept = [run for run in runs if run.folder not in given_up]
    files = sorted(runs_folder(config).glob(f"*/*/{NEEDS}"))
    unfinished = {file.parent: noted_needs(file.parent) for file in files if file.parent not in given_up}
    needed = {name for run in kept for name in needs_of(run)}.union(*unfinished.values())
    folders = artefact_folders(config, config.storage.data)
    unused = [folder for folder in folders if folder.name.removesuffix(PARTIAL) not in needed and not is_in_use(folder)]
    if config.storage.run:
        theirs = {name for run in runs if run.folder in given_up for name in run.results.get("made_from", [])}
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


def needs_of(run: StoredRun) -> set[str]:
    """Return the names of the artefacts that a run was made from; UserError if it does not say."""
    if "made_from" not in run.results:
        raise UserError(f"{run.folder} is of an earlier version and does not say what it was made from: run its command again")
    return set(run.results["made_from"])


def note_needs(folder: Path, names: list[str]) -> None:
    """Write into a run's folder which artefacts it needs, so that they stay while it has no results."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / NEEDS, "\n".join(sorted({*noted_needs(folder), *names})))


def noted_needs(folder: Path) -> list[str]:
    """Return the artefacts that a run's folder notes; none if another process has just finished the run."""
    with suppress(FileNotFoundError):
        return (folder / NEEDS).read_text().split()
    return []


def runs_folder(config: DictConfig) -> Path:
    """Return the folder in which every run has its own, by name and seed."""
    return Place(config.paths.outputs).local / "runs"


def artefact_folders(config: DictConfig, data: bool = True) -> list[Path]:
    """Return the folders of artefacts, finished or not; with ``data`` also those of the text alone, in ``paths.data``."""
    of_text = [Place(config.paths.data).local / name for name in ("prepared", "packed") if data]
    places = (*of_text, Place(config.paths.outputs).local / "artefacts")
    return [path for place in places for path in sorted(place.glob("[!.]*")) if path.is_dir()]


def is_in_use(folder: Path) -> bool:
    """Return True if a process is building an artefact."""
    return is_locked(lock_of(folder.with_name(folder.name.removesuffix(PARTIAL))))


# Stages about finished runs. They import nothing that trains, so that they answer at once.
STORAGE_STAGES: dict[str, Callable[[DictConfig], None]] = {"list": list_runs, "disk": show_disk, "prune": prune}


def look_after_runs(config: DictConfig) -> None:
    """Run the stages about finished runs, also of those at a URL."""
    download_all_results(config)
    for stage, look_after in STORAGE_STAGES.items():
        if stage in config.stages:
            look_after(config)
    upload_results(config)
