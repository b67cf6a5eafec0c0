"""The command line: ``python cli.py experiment=trime_ext``; ``--help`` names groups, stages and overrides."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to main() below, which prints one line
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the gradient reducer warns where there is nothing to mend

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import trime  # noqa: F401 (its resolvers)
from trime.run.job_results import JobResult, in_worker_process, read_job_results, write_job_result

SETTINGS_ERRORS = ("MisconfigurationException", "UsageError", "AuthenticationError")  # of Lightning and W&B, not imported here


PLACES_TO_WRITE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
LOST_JOBS = ("TerminatedWorkerError", "BrokenProcessPool", "UncompletedJobError", "FailedJobError")  # of joblib and submitit

CONF = Path(__file__).resolve().parent / "conf"


def help_text() -> str:
    """What Hydra's --help would say, which takes seconds to find the choices of so many groups."""
    told = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["hydra"]["help"]
    groups = sorted({file.parent.relative_to(CONF).as_posix() for file in CONF.glob("*/**/*.yaml")})
    choices = [f"{group}: {', '.join(sorted(file.stem for file in (CONF / group).glob('*.yaml')))}" for group in groups]
    return "\n".join([told["header"], "Groups and their choices:", *choices, "", told["footer"]])


def run_job(config: DictConfig) -> tuple[float | None, JobResult]:
    """Run one job; return the loss for sweepers, and the result. In a sweep a failed job does not stop the others."""
    from trime.run.runner import run  # here, so that --help and a wrong override answer at once

    number = OmegaConf.select(HydraConfig.get(), "job.num", default=0)  # type: ignore[arg-type]
    try:
        outcome = run(config)
    except Exception as error:
        message = format_error(error)
        print(f"error: {message}", file=sys.stderr)
        return None, JobResult(number, error=message)
    return outcome.loss, JobResult(number, OmegaConf.to_yaml(config), None, tuple(map(str, outcome.folders)))


def run_jobs() -> list[JobResult]:
    """Run the command's single job, or every job of its sweep, and return their results."""
    results: list[JobResult] = []

    @hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
    def job(config: DictConfig) -> float | None:
        loss, result = run_job(config)
        if in_worker_process():
            write_job_result(result)
        else:
            results.append(result)
        return loss

    error: str | None = None
    try:
        job()
    except (HydraException, OmegaConfBaseException):
        raise
    except Exception as raised:
        died = type(raised).__name__ in LOST_JOBS
        error = (
            f"the process of a job died ({one_line(raised)[:200]}): the same command goes on" if died else format_error(raised)
        )
        print(f"error: {error}", file=sys.stderr)
    return [*results, *results_of_workers(), *([JobResult(-1, error=error)] if error else [])]


def results_of_workers() -> Iterator[JobResult]:
    """Yield the results of jobs in other processes; their launchers keep what a job prints in files of their own."""
    for result in read_job_results():
        if result.error:
            print(f"error: job {result.number}: {result.error}", file=sys.stderr)
        yield result


def report_jobs(results: list[JobResult]) -> bool:
    """Report all runs of a sweep together; return True where everything went well."""
    from trime.run.runner import report_sweep

    finished = [result for result in results if result.settings]
    try:
        if finished:
            config = OmegaConf.create(finished[-1].settings)
            report_sweep(config, [Path(folder) for result in finished for folder in result.folders])  # type: ignore[arg-type]
    except Exception as error:
        print(f"error: {format_error(error)}", file=sys.stderr)
        return False
    return not any(result.error for result in results)


def format_error(error: BaseException) -> str:
    """Return a user's mistake as one line; raise anything else again: it is a defect and keeps its traceback."""
    from trime.types import UserError

    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if any(is_full_disk(cause) for cause in causes):
        place = getattr(error, "filename", None) or "while writing"
        return f"the disk is full ({place}): free space or set paths.outputs and paths.data; the same command goes on"
    for cause in reversed(causes):
        if isinstance(cause, UserError):
            return one_line(cause)
    if isinstance(error, HydraException | OmegaConfBaseException):  # instantiate wraps what a constructor raised
        return one_line(causes[-1] if isinstance(causes[-1], ValueError) else error)
    if type(error).__name__ in SETTINGS_ERRORS:
        return one_line(error)
    for cause in causes:
        if isinstance(cause, FileNotFoundError):
            return f"{cause.strerror}: {cause.filename}" if cause.filename else one_line(cause)
        if isinstance(cause, OSError) and cause.errno in PLACES_TO_WRITE:
            mend = "if it is to be written, choose another place by paths.outputs, paths.data or report.keep"
            return f"{cause.strerror}: {cause.filename}: {mend}"
    if is_of_a_sweep(error):
        return f"{one_line(error)}: see hydra.sweeper and hydra.launcher"
    raise error


def is_of_a_sweep(error: BaseException) -> bool:
    """What a sweeper or a launcher raised itself, not a job."""
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    theirs = {"hydra_plugins", "optuna", "joblib", "submitit"} & {*last.parts}
    return bool(theirs) and isinstance(error, ValueError | NotImplementedError | AssertionError)


def is_full_disk(error: BaseException) -> bool:
    """ENOSPC, and what safetensors, NumPy and FAISS make of it."""
    text = str(error)
    short = "requested and" in text and "written" in text  # NumPy's tofile
    said = "No space left" in text or "os error 28" in text or "write error in" in text
    return getattr(error, "errno", None) == errno.ENOSPC or short or said


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def main() -> int:
    """Exit status 1 where a run failed."""
    if {"--help", "-h"} & {*sys.argv[1:]}:
        print(help_text())
        return 0
    try:
        return 0 if report_jobs(run_jobs()) else 1
    except (HydraException, OmegaConfBaseException) as error:
        mend = (
            "pip install 'trime[sweep]'"
            if any(name in str(error) for name in ("hydra/sweeper/optuna", "hydra/launcher/joblib", "hydra/launcher/submitit"))
            else "python cli.py --help names groups and keys"
        )
        print(f"error: {one_line(error)} ({mend})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
