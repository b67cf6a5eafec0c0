"""The jobs of a command: one run, a sweep with a forecast, or a search whose best run is reported.

Jobs that a launcher runs in other processes pass their results back as JSON files below the sweep's folder, which all machines
share; the command reads them at the end.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trime.config.folder import PROGRAM

FOLDER, OWNER = "TRIME_SWEEP", "TRIME_SWEEP_OWNER"  # environment variables, which jobs in other processes inherit


class JobResult(NamedTuple):
    """Outcome of one job: its resolved configuration (YAML) or the error that ended it, and its report.

    ``loss`` is the dev loss of the experiment's own row; ``folders`` are those of the runs; ``made``: whether it made anything.
    """

    number: int
    settings: str | None = None
    error: str | None = None
    folders: tuple[str, ...] = ()
    loss: float | None = None
    made: bool = False


class JobResults(Callback):
    """Hydra callback: choose the folder for job results before a sweep's first job starts."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        os.environ[FOLDER] = str(Path(config.hydra.sweep.dir).absolute() / f"jobs-{uuid.uuid4().hex}")
        os.environ[OWNER] = this_process()


def this_process() -> str:
    """Return a name of this process that is unique among all machines."""
    return f"{socket.gethostname()}:{os.getpid()}"


def read_job_results() -> list[JobResult]:
    """Return the results of jobs that ran in other processes, remove their files, and print their errors.

    The errors would be seen nowhere else, for launchers write a job's own output to files.
    """
    os.environ.pop(OWNER, None)
    folder = Path(os.environ.pop(FOLDER, ""))
    if not folder.name.startswith("jobs-"):
        return []
    results = [JobResult(**json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("*.json"))]
    shutil.rmtree(folder, ignore_errors=True)
    for result in results:
        if result.error:
            print(f"error: job {result.number}: {result.error}", file=sys.stderr)
    return results


class Jobs:
    """The jobs of one command, and their results."""

    def __init__(self, describe: Any):
        """``describe`` returns the one line of an error that is the user's, and raises any other again."""
        self.describe = describe
        self.results: list[JobResult] = []
        self.seconds: list[float | None] = []  # None for a run that was complete already, or failed
        self.shown: set[str] = set()  # warnings of a sweep

    def __call__(self, config: DictConfig) -> float | None:
        """Run one job; return its loss, which sweepers minimise. If it fails, the other jobs still run."""
        in_worker = FOLDER in os.environ and os.environ.get(OWNER) != this_process()
        started, runs = time.perf_counter(), 0 if in_worker else runs_of_sweep()
        if runs > 1 and not self.seconds:
            print(f"{runs} runs; those that share a model train it once, and each says how long the rest will take", flush=True)
        if runs > 1:
            show_news_alone(self.shown)
        result = self.run(config)
        self.seconds.append(time.perf_counter() - started if result.made else None)
        if runs > 1:
            print(forecast(self.seconds, runs, failed=result.error is not None), flush=True)
        if in_worker:
            from trime.common.io import write_json

            folder = Path(os.environ[FOLDER])
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / f"{result.number:06d}.json", result._asdict(), indent=None)
        else:
            self.results.append(result)
        return result.loss

    def run(self, config: DictConfig) -> JobResult:
        """Run the experiment of a job; return its result, or the error that ended it, which is printed."""
        from trime.lab.runner import run  # imported late, so that --help and a wrong override answer at once

        number = OmegaConf.select(HydraConfig.get(), "job.num", default=0)  # type: ignore[arg-type]
        try:
            outcome = run(config)
        except Exception as error:
            message = self.describe(error)
            print(f"error: {message}", file=sys.stderr)
            return JobResult(number, error=message)
        return JobResult(number, OmegaConf.to_yaml(config), None, tuple(map(str, outcome.folders)), outcome.loss, outcome.made)


def show_news_alone(shown: set[str]) -> None:
    """Let the screen show only warnings, each once in a sweep; ``shown`` are those so far. The run's log has all messages."""

    def is_news(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if record.levelno < logging.WARNING or message in shown:
            return False
        shown.add(message)
        return True

    for handler in logging.getLogger("trime").handlers:
        handler.addFilter(is_news)


def report_jobs(results: Sequence[JobResult]) -> None:
    """Report all runs of a sweep together; of a search, whose jobs are not scored on test, Hydra's sweeper names the best."""
    from trime.lab.runner import report_sweep

    finished = [result for result in results if result.settings]
    if not finished:
        return
    config: DictConfig = OmegaConf.create(str(finished[-1].settings))  # type: ignore[assignment]
    if not config.search:
        folders = [Path(folder) for result in finished for folder in result.folders]
        report_sweep(config, folders, shlex.join([*PROGRAM, *sys.argv[1:]]), several=len(results) > 1)


def runs_of_sweep() -> int:
    """Return the number of runs of the present sweep, with the choices of its table; 0 for a search and a single run."""
    if not HydraConfig.initialized():
        return 0
    hydra_config = HydraConfig.get()
    if hydra_config.mode != RunMode.MULTIRUN or not hydra_config.sweeper._target_.endswith(".BasicSweeper"):
        return 0
    choices = [f"{name}={value}" for name, value in (hydra_config.sweeper.params or {}).items()]
    return count_runs([*choices, *(word for word in sys.argv[1:] if "=" in word and not word.startswith("-"))])


def count_runs(words: Sequence[str]) -> int:
    """Return the number of runs that the choices in overrides make, the later ones of a setting; 0 if they cannot be read."""
    hydra = GlobalHydra.instance()
    try:  # glob(…) looks for the files of a group
        overrides = OverridesParser.create(hydra.config_loader() if hydra.is_initialized() else None).parse_overrides([*words])
    except HydraException:  # Hydra says it when it reads them
        return 0
    counts = {each.get_key_element(): len([*each.sweep_iterator()]) if each.is_discrete_sweep() else 1 for each in overrides}
    return math.prod(counts.values())


def forecast(seconds: Sequence[float | None], runs: int, failed: bool = False) -> str:
    """Return a line on a sweep of ``runs`` whose first ones took ``seconds``; None for one that made nothing new.

    Such a run was complete already, or failed: it says nothing of how long another one takes.
    """
    number, last, took = len(seconds), seconds[-1], [each for each in seconds if each is not None]
    did = f"took {duration(last)}" if last is not None else "failed" if failed else "had nothing to make"
    line = f"run {number} of {runs} {did}"
    if not took or number >= runs:
        return line
    return f"{line}: about {duration(mean(took) * (runs - number))} more"


def duration(seconds: float) -> str:
    """Return seconds as a person says them, as in ``40 s``, ``4 min`` and ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
