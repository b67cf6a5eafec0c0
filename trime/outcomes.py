"""What jobs of a sweep tell the command that started them, where a launcher runs them in processes of their own.

A job leaves a file for each run under the sweep's folder, which all machines see; the command reads them at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

PLACE = "TRIME_SWEEP"
started: list[str] = []  # places of this process's own sweeps


class Outcomes(Callback):
    """Says where, before the first job."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        os.environ[PLACE] = str(Path(config.hydra.sweep.dir).absolute() / f"jobs-{uuid.uuid4().hex}")
        started.append(os.environ[PLACE])


def elsewhere() -> bool:
    """This is a job in a process of its own."""
    return PLACE in os.environ and os.environ[PLACE] not in started


def leave(outcome: dict[str, Any]) -> None:
    """One job's, whole or not at all."""
    folder = Path(os.environ[PLACE])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{outcome['job']:06d}.json"
    file.with_suffix(".partial").write_text(json.dumps(outcome))
    file.with_suffix(".partial").replace(file)


def left() -> Iterator[dict[str, Any]]:
    """All of them, in the order of jobs; they are read once."""
    folder = Path(os.environ.pop(PLACE, ""))
    if folder.name.startswith("jobs-"):
        for file in sorted(folder.glob("*.json")):
            yield json.loads(file.read_text())
        shutil.rmtree(folder, ignore_errors=True)
