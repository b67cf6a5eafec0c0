"""Read the results.json files of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trime.types import UserError


def results_in(folders: list[Path]) -> list[dict[str, Any]]:
    """Return the content of every results.json below some folders, the oldest first."""
    paths = sorted({path for folder in folders for path in folder.rglob("results.json")}, key=lambda path: path.stat().st_mtime)
    return [read_run(path) for path in paths]


def read_run(path: Path) -> dict[str, Any]:
    """Return the content of a results.json; UserError if it is truncated or not a run's."""
    try:
        results = json.loads(path.read_text())
        if not {"name", "seed", "metrics"} <= results.keys():
            raise ValueError("not the results of a run")
    except (ValueError, AttributeError):
        raise UserError(f"{path} is truncated or not the results of a run: delete it and run its experiment again") from None
    return results
