"""Results of a sweep's jobs that a launcher runs in other processes, passed back to the command that started the sweep.

Each such job writes one JSON file below the sweep's folder, which all machines share; the command reads them at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

FOLDER, OWNER = "TRIME_SWEEP", "TRIME_SWEEP_OWNER"  # environment variables, which jobs in other processes inherit


class JobResult(NamedTuple):
    """Outcome of one job: its resolved configuration (YAML) or the error that ended it, its overrides, what it reported.

    ``loss`` is the dev loss of the experiment's own row; ``folders`` are those of the runs; ``made``: whether it made anything.
    """

    number: int
    settings: str | None = None
    error: str | None = None
    folders: tuple[str, ...] = ()
    loss: float | None = None
    overrides: tuple[str, ...] = ()
    made: bool = False


class JobResults(Callback):
    """Hydra callback: choose the folder for job results before a sweep's first job starts."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        os.environ[FOLDER] = str(Path(config.hydra.sweep.dir).absolute() / f"jobs-{uuid.uuid4().hex}")
        os.environ[OWNER] = this_process()


def this_process() -> str:
    """Return a name of this process that is unique among all machines."""
    return f"{socket.gethostname()}:{os.getpid()}"


def in_worker_process() -> bool:
    """Return True if this job runs in another process than the command."""
    return FOLDER in os.environ and os.environ.get(OWNER) != this_process()


def write_job_result(result: JobResult) -> None:
    """Write one job's result atomically."""
    from trime.common.io import write_json

    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{result.number:06d}.json", result._asdict(), indent=None)


def read_job_results() -> Iterator[JobResult]:
    """Yield the results of all jobs that ran in other processes, in job order, then remove their files."""
    os.environ.pop(OWNER, None)
    folder = Path(os.environ.pop(FOLDER, ""))
    if folder.name.startswith("jobs-"):
        for file in sorted(folder.glob("*.json")):
            yield JobResult(**json.loads(file.read_text()))
        shutil.rmtree(folder, ignore_errors=True)
