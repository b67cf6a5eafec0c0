"""Read and write the results.json files of runs, which carry a checksum of their own content."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trime.errors import UserError
from trime.io import checksum_of, compact_json, write_atomically
from trime.places import Place
from trime.report.command_lines import without_paths

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
    paths = sorted({path for folder in folders for path in folder.rglob("results.json")}, key=lambda path: path.stat().st_mtime)
    return [read_run(path) for path in paths]


def read_runs(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the content of some results.json files, each once, by the order of their paths."""
    return [read_run(path) for path in sorted({path.resolve() for path in files})]


def find_runs(patterns: list[str]) -> list[dict[str, Any]]:
    """Return the results of all runs that some patterns match, each once."""
    paths: set[Path] = set()
    for pattern in map(Place, patterns):
        if pattern.is_remote:
            download_results(pattern)
        files = map(results_file, map(Path, glob.glob(str(pattern.local), recursive=True)))
        paths |= {file for file in files if file}
    return read_runs(paths)


def download_results(pattern: Place) -> None:
    """Copy every results.json to this machine that lies below the URL before the pattern's first wildcard."""
    whole = re.split(r"/[^/]*[*?\[]", pattern.address, maxsplit=1)[0]
    place = Place(whole.removesuffix("/results.json"))
    place.download([name for name in place.files() if name.rpartition("/")[2] == "results.json"])


def results_file(path: Path) -> Path | None:
    """Return the results.json of a run's folder, or the path itself if it is one or a kept result; else None."""
    if path.is_dir():
        file = path / "results.json"
        return file if file.exists() else None
    is_kept = path.suffix == ".json" and path.parent.parent.name == "tables"
    return path if path.name == "results.json" or is_kept else None


def read_run(path: Path) -> dict[str, Any]:
    """Return the content of a results.json; UserError if it is truncated, not a run's, or was changed after it was written.

    Files of versions that wrote no checksum are accepted as they are.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if not {"name", "seed", "metrics"} <= results.keys():
            raise ValueError("not the results of a run")
    except FileNotFoundError:
        raise UserError(f"there are no results in {path.parent}: run its experiment first") from None
    except (OSError, ValueError, AttributeError):
        raise UserError(f"{path} is truncated or not the results of a run: delete it and run its experiment again") from None
    written = results.pop(CHECKSUM, None)
    if written not in (None, checksum_of(results)):
        raise UserError(f"{path} was changed after it was written: delete it and run its experiment again")
    return results
