"""What a worker process of an engine does: it opens a job once, and makes the parts that it is given."""

from __future__ import annotations

import threading
from typing import Any

from trime.engines.base import Job, MakePart

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")  # read when torch is imported
IDLE = 60  # seconds that workers keep what they opened, and wait for the next job
LOST = 3  # times that workers may die before a job fails


class Worker:
    """What this process has opened last: a job, and what makes its parts. It is freed after ``IDLE`` seconds without a part."""

    opened: tuple[tuple[Any, ...], MakePart] | None = None
    timer: threading.Timer | None = None

    @classmethod
    def free(cls) -> None:
        """Let go of the model or index that the last job opened."""
        cls.opened = None


def make_part(job: Job, number: int) -> int:
    """Make a part in a worker process, and return how much work it was; the first one of a job opens it."""
    if Worker.timer:
        Worker.timer.cancel()
    key = job[1:]  # all but the function that opens it
    opened = Worker.opened
    if opened is None or opened[0] != key:
        Worker.free()  # before anything else is opened
        Worker.opened = opened = key, job.open(job)
    amounts: list[int] = []
    opened[1](number, amounts.append)
    Worker.timer = threading.Timer(IDLE, Worker.free)
    Worker.timer.daemon = True
    Worker.timer.start()
    return sum(amounts)
