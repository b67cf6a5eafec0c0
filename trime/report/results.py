"""Read and write the results.json files of runs, which carry a checksum of their own content."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trime.errors import UserError
from trime.io import checksum_of, compact_json, write_atomically
from trime.report.command_lines import without_paths
from trime.report.texts import evaluated_text, other_texts

RESULTS = "results.json"  # in a run's folder; kept results have names of their own
SHOWN_FILES = 5  # names of files that a line lists
OBSERVED = ("loss", "tokens", "documents", "bleu", "exact_match", "contained", "by_depth", "questions")  # of a row
CHECKSUM = "checksum"  # the key of results.json that holds it
PLACES = ("path", "babi", "background")  # settings of texts and questions that say where they lie


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write the results of a run with their checksum."""
    content = {key: value for key, value in results.items() if key != CHECKSUM}
    write_atomically(path, compact_json(content | {CHECKSUM: checksum_of(content)}, path))


def portable(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a run without paths of this machine."""
    content = {key: value for key, value in results.items() if key != "artefacts"}
    content["command"] = without_paths(results.get("command"))
    for key in {"dataset", "evaluation_dataset", "questions"} & content.keys():
        content[key] = {name: value for name, value in content[key].items() if name not in PLACES}
    return content


def results_in(folders: list[Path]) -> list[dict[str, Any]]:
    """Return the content of every results.json below some folders, the oldest first."""
    paths = sorted({path for folder in folders for path in folder.rglob(RESULTS)}, key=lambda path: path.stat().st_mtime)
    return [read_run(path) for path in paths]


def read_runs(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the content of some results.json files, each once, by the order of their paths."""
    return [read_run(path) for path in sorted({path.resolve() for path in files})]


def find_runs(patterns: list[str]) -> list[dict[str, Any]]:
    """Return the results of all runs that some patterns match, each once.

    A pattern names files, run folders, or folders below which all results are found. One line names the files that hold
    something else, and the patterns that match no results.
    """
    paths: set[Path] = set()
    others: set[Path] = set()
    for pattern in patterns:
        files = json_files(glob.glob(str(Path(pattern).expanduser()), recursive=True))
        found = {file for file in files if file.name == RESULTS or holds_results(file)}
        if not files and len(patterns) > 1:
            print(f"report: {pattern} matches no results of a run")
        paths |= found
        others |= files - found
    if others:
        names = sorted(str(file) for file in others)
        more = f" and {len(names) - SHOWN_FILES:,} more" if len(names) > SHOWN_FILES else ""
        print(f"report: left out, as they hold no results of a run: {', '.join(names[:SHOWN_FILES])}{more}")
    return read_runs(paths)


def distinct_runs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every observation once, and print which runs are copies of others: another folder or name is no second seed.

    Of copies, the one that recorded most is kept: an analysis does not change what was observed.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(observation(run), []).append(run)
    copies = [(run, first) for first, *rest in found.values() for run in rest]
    if copies:
        names = [f"{run['name']} seed {run['seed']} (of {first['name']} seed {first['seed']})" for run, first in copies]
        print(f"report: counted once, as settings and results are the same: {', '.join(names)}")
    return [max(same, key=len) for same in found.values()]


def observation(run: dict[str, Any]) -> str:
    """Return what identifies an observation: the settings, and every result apart from times and memory.

    The seed counts where it chose the questions or trained the model that answers; equal losses of every document show that
    no seed mattered.
    """
    results = {split: [{key: row.get(key) for key in OBSERVED} for row in rows] for split, rows in run["metrics"].items()}
    settings = run.get("config_hash") or [run["name"], run["parameters"]]
    if "questions" not in run:
        return checksum_of([settings, evaluated_text(run), other_texts(run), results])
    asked = {key: value for key, value in run["questions"].items() if key not in PLACES}
    seed = run["seed"] if run.get("small_model") else None
    return checksum_of([settings, asked, run.get("questions_text"), seed, results])


def json_files(names: Iterable[str]) -> set[Path]:
    """Return the JSON files among some paths and below them, without those that stand beside or below a results.json."""
    files: set[Path] = set()
    for path in map(Path, names):
        below = glob.glob(f"{glob.escape(str(path))}/**/*.json", recursive=True)  # follows links, as the pattern does
        files |= {*map(Path, below)} if path.is_dir() else {path} & {path.with_suffix(".json")}
    return {file for file in files if file.name == RESULTS or not any((folder / RESULTS).exists() for folder in file.parents)}


def holds_results(path: Path) -> bool:
    """Return whether a JSON file has the form of a run's results; UserError if it is no JSON."""
    try:
        return is_run(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise UserError(f"{path} is truncated or no JSON: delete it, or name other files in report.runs") from None


def is_run(content: Any) -> bool:
    """Return whether the content of a file has the form of a run's results."""
    return isinstance(content, dict) and {"name", "seed", "metrics"} <= content.keys()


def read_run(path: Path) -> dict[str, Any]:
    """Return the content of a results.json; UserError if it is truncated, not a run's, or was changed after it was written.

    Files of versions that wrote no checksum are accepted as they are.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if not is_run(results):
            raise ValueError("not the results of a run")
    except FileNotFoundError:
        raise UserError(f"there are no results in {path.parent}: run its experiment first") from None
    except (OSError, ValueError):
        raise UserError(f"{path} is truncated or not the results of a run: delete it and run its experiment again") from None
    written = results.pop(CHECKSUM, None)
    if written not in (None, checksum_of(results)):
        raise UserError(f"{path} was changed after it was written: delete it and run its experiment again")
    return results
