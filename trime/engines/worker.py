"""What a worker process of an engine does: it opens a job once, and makes the parts that it is given."""

from __future__ import annotations

from trime.engines.base import Job, MakePart

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")  # read when torch is imported
LOST = 3  # times that workers may die before a job fails


class Worker:
    """What this process has opened last: a job, and what makes its parts."""

    opened: tuple[tuple[str, ...], MakePart] | None = None


def make_part(job: Job, number: int) -> int:
    """Make a part in a worker process, and return how much work it was; the first one of a job opens it."""
    key = job.settings, job.stage, job.name, str(job.folder)
    if Worker.opened is None or Worker.opened[0] != key:
        Worker.opened = None  # frees what the job before had opened
        Worker.opened = key, job.open(job)
    amounts: list[int] = []
    Worker.opened[1](number, amounts.append)
    return sum(amounts)
