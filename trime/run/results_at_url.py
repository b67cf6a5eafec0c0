"""Results of runs where ``paths.outputs`` is a URL: copied to this machine to be listed or compared, and back when written."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from omegaconf import DictConfig

from trime.places import Place, complete_files

FOLDERS = ("runs", "reports", "sweeps")  # of outputs; artefacts are copied one by one when they are complete


def download_all_results(config: DictConfig) -> None:
    """Copy the results of all runs at the URL to this machine; nothing if outputs are a path."""
    runs = Place(config.paths.outputs) / "runs"
    if runs.is_remote:
        download_results(runs)


def upload_results(config: DictConfig) -> None:
    """Copy what runs and reports have written on this machine to the URL; nothing if outputs are a path."""
    outputs = Place(config.paths.outputs)
    if not outputs.is_remote or not outputs.local.is_dir():
        return
    outputs.upload(path.name for path in outputs.local.iterdir() if path.is_file() and not path.name.startswith("."))
    for place in (outputs / name for name in FOLDERS):
        there = place.files()
        names = complete_files(place.local)
        place.upload(name for name in names if name not in there or there[name].is_older(place.local / name))


def download_results(pattern: Place) -> None:
    """Copy the results to this machine that lie below the URL before the pattern's first wildcard."""
    whole = re.split(r"/[^/]*[*?\[]", pattern.address, maxsplit=1)[0]
    place = Place(re.sub(r"/[^/]*\.json$", "", whole))
    names = {PurePosixPath(name) for name in place.files() if name.endswith(".json")}
    folders = {name.parent for name in names if name.name == "results.json"}
    place.download([str(name) for name in names if name.name == "results.json" or not folders & {*name.parents}])
