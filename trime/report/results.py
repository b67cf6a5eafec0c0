"""Results of runs as their files hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trime.types import UserError


def results_in(places: list[Path]) -> list[dict[str, Any]]:
    """Every results.json below some folders, oldest first."""
    paths = sorted({path for place in places for path in place.rglob("results.json")}, key=lambda path: path.stat().st_mtime)
    return [read_run(path) for path in paths]


def read_run(path: Path) -> dict[str, Any]:
    """A results.json; UserError where it is truncated or none."""
    try:
        found = json.loads(path.read_text())
        if not {"name", "seed", "metrics"} <= found.keys():
            raise ValueError("no run")
    except (ValueError, AttributeError):
        raise UserError(f"{path} is truncated or no run's results: delete it and run its experiment again") from None
    return found
