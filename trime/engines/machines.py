"""Parts are made by the machines of ``trainer.num_nodes``, which share a disk and take parts in turns.

Which there are, and who has taken which, stands in a store of torch.distributed.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import NamedTuple

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from trime.engines.base import Advance, Engine, Job, MakePart
from trime.errors import UserError

log = logging.getLogger(__name__)

CONNECTING = timedelta(minutes=30)  # for the other machines to find the first one's store
POLL = 0.1  # seconds between two looks for a job


@cache
def open_store(first: bool) -> TCPStore:
    """Return the store at MASTER_ADDR, on the port after MASTER_PORT; the first machine holds it, for all runs of a command.

    UserError if it cannot be opened.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
    try:
        return TCPStore(host, port, is_master=first, wait_for_workers=False, timeout=CONNECTING)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        raise UserError(f"the machines share their work at {host}:{port}, the port after MASTER_PORT: {said}") from None


class Announced(NamedTuple):
    """A job as the first machine tells the others: an artefact of their own plan, and the parts that are missing."""

    number: int  # of the job, from 0
    stage: str
    name: str
    parts: list[int]

    @classmethod
    def read(cls, store: TCPStore, number: int) -> Announced | None:
        """Wait for the job of a number; None if the first machine has finished the run, or is gone."""
        try:
            while not store.check([f"job {number}"]):
                time.sleep(POLL)
            content = json.loads(store.get(f"job {number}"))
        except DistNetworkError:
            return None
        return cls(number, *content) if content else None

    def take(self, store: TCPStore, count: int) -> list[int]:
        """Return the next ``count`` parts that no machine has taken, fewer at the end."""
        last = store.add(f"taken {self.number}", count)
        return self.parts[last - count : last]

    def tell_made(self, store: TCPStore, parts: list[int], amount: int) -> None:
        """Tell the first machine which parts are made, and how much work they were."""
        store.add(f"amount {self.number}", amount)
        for part in parts:
            store.set(f"made {self.number} {part}", "")

    def missing(self, store: TCPStore) -> list[int]:
        """Return the parts that no machine has made yet."""
        return [part for part in self.parts if not store.check([f"made {self.number} {part}"])]

    def is_over(self, store: TCPStore) -> bool:
        """Return whether the first machine has all parts."""
        return store.check([f"over {self.number}"])


class Machines(Engine):
    """The first machine, which takes parts as the others do, and makes at the end what a slow or lost one has not made.

    ``own`` makes the parts that this machine has taken.
    """

    def __init__(self, store: TCPStore, own: Engine):
        self.store, self.own = store, own

    def run(self, job: Job, make: MakePart, numbers: list[int], advance: Advance) -> None:
        announced = Announced(self.store.add("jobs", 1) - 1, job.stage, job.name, numbers)
        told = 0

        def tell_progress() -> None:
            nonlocal told
            amount = self.store.add(f"amount {announced.number}", 0)
            advance(amount - told)
            told = amount

        self.store.set(f"job {announced.number}", json.dumps(announced[1:]))
        slowest = 0.0
        try:
            while taken := announced.take(self.store, parts_at_once(self.own)):
                started = time.monotonic()
                self.own.run(job, make, taken, advance)
                slowest = max(slowest, time.monotonic() - started)
                announced.tell_made(self.store, taken, 0)
                tell_progress()
            given_up = time.monotonic() + slowest  # the others began their last parts before now
            while announced.missing(self.store) and time.monotonic() < given_up:
                time.sleep(POLL)
            while missing := announced.missing(self.store)[: parts_at_once(self.own)]:
                self.own.run(job, make, missing, advance)
                announced.tell_made(self.store, missing, 0)
            tell_progress()
        finally:
            self.store.set(f"over {announced.number}", "")

    def finish(self) -> None:
        """Tell the other machines that the run is over."""
        self.store.set(f"job {self.store.add('jobs', 1) - 1}", json.dumps(None))


def assist(store: TCPStore, open_job: Callable[[str, str], tuple[Job, MakePart]], own: Engine) -> int:
    """Make parts for the first machine until the run is over; return how many.

    ``open_job`` returns the job of an artefact by its stage and name, and what makes its parts. A part that fails here is left
    to the first machine, which tells why.
    """
    made = 0
    while announced := Announced.read(store, next_job(store)):
        try:
            made += assist_job(store, announced, open_job, own)
        except DistNetworkError:
            break
        except (UserError, OSError) as error:  # the folder of a job is gone when the first machine was faster
            log.info(f"{announced.stage}: left to the first machine ({error})")
    return made


def next_job(store: TCPStore) -> int:
    """Return the number of the next job that this machine has not seen; -1 if the first machine is gone."""
    try:
        return int(store.add(f"seen by {os.environ['NODE_RANK']}", 1)) - 1
    except DistNetworkError:
        return -1


def assist_job(store: TCPStore, announced: Announced, open_job: Callable[[str, str], tuple[Job, MakePart]], own: Engine) -> int:
    """Make parts of a job until none is left, and return how many."""
    made, opened = 0, None
    while not announced.is_over(store) and (taken := announced.take(store, parts_at_once(own))):
        job, make = opened = opened or open_job(announced.stage, announced.name)
        amounts: list[int] = []
        own.run(job, make, taken, amounts.append)
        announced.tell_made(store, taken, sum(amounts))
        made += len(taken)
    return made


def parts_at_once(engine: Engine) -> int:
    """Return how many parts an engine makes at once."""
    return int(getattr(engine, "workers", 1))
