"""The folder of a report of several runs: one for each set of runs, and a link to the latest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

LATEST = "latest"  # the link's name


def report_folder(reports: Path, name: str, runs: list[dict[str, Any]]) -> Path:
    """Return the folder of a report below ``reports``: its name, and a hash of which runs it compares."""
    identities = sorted([str(run.get(key)) for key in ("name", "seed", "config_hash", "dataset")] for run in runs)
    return reports / f"{name}-{hashlib.sha256(json.dumps(identities).encode()).hexdigest()[:6]}"


@contextmanager
def writing_report(folder: Path) -> Iterator[None]:
    """Afterwards delete the files of an earlier report that were not written again, and link the folder as the latest."""
    folder.mkdir(parents=True, exist_ok=True)
    earlier = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}
    yield
    for path, written in earlier.items():
        with suppress(FileNotFoundError):  # another process may report the same runs
            if path.stat().st_mtime_ns == written:
                path.unlink()
    with suppress(OSError):  # not every file system has links
        link = folder.with_name(f".{LATEST}-{uuid4().hex}")
        link.symlink_to(folder.name)
        os.replace(link, folder.with_name(LATEST))
