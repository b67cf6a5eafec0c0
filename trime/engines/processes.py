"""Parts are made by several processes of this machine: on a device each, or with a share of the threads."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from trime.engines.base import Advance, Engine, Job, MakePart
from trime.engines.local import Local
from trime.engines.worker import IDLE, LOST, THREADS, make_part
from trime.errors import UserError

log = logging.getLogger(__name__)


class Processes(Engine):
    """``workers`` processes, each with ``threads`` threads (None: an equal share of the cores), or a device of its own.

    If a worker dies, so do the others, and the parts that they were making are made again.
    """

    def __init__(self, workers: int, threads: int | None = None, devices: int = 0):
        self.workers, self.devices = min(workers, devices or workers), devices
        self.threads = threads or max(1, (os.cpu_count() or 1) // self.workers)

    def run(self, job: Job, make: MakePart, numbers: list[int], advance: Advance) -> None:
        if min(self.workers, len(numbers)) < 2:
            Local().run(job, make, numbers, advance)
            return
        missing, lost = [*numbers], 0
        while missing:
            try:
                for number, amount in self.made(job, missing):
                    missing.remove(number)
                    advance(amount)
            except BrokenProcessPool:
                lost += 1
                if lost > LOST:
                    raise UserError(
                        f"engine=processes: workers died {lost} times while {job.name} was made, as when memory runs out: "
                        "lower engine.workers; the same command resumes"
                    ) from None
                log.warning(f"{job.stage}: a worker died; {len(missing)} parts are still to be made")

    def made(self, job: Job, numbers: list[int]) -> Iterator[tuple[int, int]]:
        """Make parts and yield the number and the work of each that is finished; BrokenProcessPool if a worker dies."""
        with (
            environment(dict.fromkeys(THREADS, str(self.threads))),
            pool.lent(self.workers, self.threads, self.devices) as executor,
        ):
            futures = {executor.submit(make_part, job, number): number for number in numbers}
            for future in as_completed(futures):
                yield futures[future], future.result()


class Pool:
    """The workers of this process. Those of one job wait for the next for ``IDLE`` seconds, since starting takes some."""

    def __init__(self) -> None:
        self.kind: tuple[int, ...] | None = None
        self.executor: ProcessPoolExecutor | None = None
        self.jobs = 0  # so far
        self.lock = threading.Lock()

    @contextmanager
    def lent(self, workers: int, threads: int, devices: int) -> Iterator[ProcessPoolExecutor]:
        """Lend workers for a job; if it fails, they are stopped."""
        with self.lock:
            self.jobs += 1
            if self.kind != (workers, threads, devices):
                self.stop()
            self.kind = workers, threads, devices
            self.executor = executor = self.executor or start_pool(workers, devices)
        try:
            yield executor
        except BaseException:
            self.close()
            raise
        timer = threading.Timer(IDLE, self.close, (self.jobs,))
        timer.daemon = True
        timer.start()

    def close(self, jobs: int | None = None) -> None:
        """Stop the workers, unless there have been more than ``jobs`` jobs."""
        with self.lock:
            if jobs in (None, self.jobs):
                self.stop()

    def stop(self) -> None:
        """Stop the workers; the lock must be held."""
        if self.executor:
            self.executor.shutdown(wait=False, cancel_futures=True)
        self.executor = None


def start_pool(workers: int, devices: int) -> ProcessPoolExecutor:
    """Return an executor that starts its workers when there is work for them."""
    context = multiprocessing.get_context("spawn")
    free = context.SimpleQueue()
    for name in device_names(devices):
        free.put(name)
    return ProcessPoolExecutor(workers, context, start_worker, (os.getpid(), free if devices else None))


def device_names(count: int) -> list[str]:
    """Return the names of CUDA devices, of those only that ``CUDA_VISIBLE_DEVICES`` leaves this process, if it is set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [*map(str, range(count))] if visible is None else [name for name in visible.split(",") if name]
    if len(names) < count:
        raise UserError(f"engine.devices={count}: CUDA_VISIBLE_DEVICES={visible} leaves {len(names)}: lower engine.devices")
    return names[:count]


pool = Pool()


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables, which processes that are started meanwhile inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_worker(parent: int, free: Any) -> None:
    """Prepare a worker process: it takes a device if there are any, and ends with the process that started it."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    threading.Thread(target=exit_with, args=(parent,), daemon=True).start()
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if free is None else free.get()


def exit_with(parent: int) -> None:
    """Exit once the parent process is gone, whatever its fate."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
