"""Engines that make independent shards of an artefact: this process, or the workers of Ray."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from trime.common.choices import THREADS
from trime.errors import UserError
from trime.token_memory.search.ray_cluster import RESTARTS, check_resources, connect

Advance = Callable[[int], object]  # takes how much work was done since the last call
MakeShard = Callable[[int, Advance], None]  # makes the shard with a number


class Job(NamedTuple):
    """An artefact in shards, described so that another process can open it.

    ``open`` is a function at the level of a module that loads models and indexes, and returns the function that makes a shard.
    """

    open: Callable[[Job], MakeShard]
    settings: str  # the resolved configuration as YAML
    stage: str
    name: str  # of the artefact
    folder: Path  # in which it is built


class Engine(ABC):
    """Makes the shards of a job, in any order. A finished shard stays, whatever happens to the rest."""

    @abstractmethod
    def run(self, job: Job, make: MakeShard, numbers: list[int], advance: Advance) -> None:
        """Make the shards with these numbers; ``make`` does so in this process. UserError as ``make`` raises it."""


class Local(Engine):
    """This process makes every shard, with all threads of ``threads=``."""

    def run(self, job: Job, make: MakeShard, numbers: list[int], advance: Advance) -> None:
        for number in numbers:
            make(number, advance)


class Ray(Engine):
    """The workers of a Ray cluster at ``address``, or of Ray on this machine (null), make shards side by side.

    There are as many workers as there is room for, with ``cores`` cores and ``devices`` CUDA devices each. All machines have
    the same version of trime, and see the folders of a run under the same path. Ray makes a shard again elsewhere if its worker
    or its machine is lost.
    """

    def __init__(self, address: str | None = None, cores: int = 1, devices: int = 0):
        if address not in (None, "auto") and ":" not in str(address):
            raise UserError(f"engine.address={address}: it must be null, auto or HOST:PORT")
        self.address, self.cores, self.devices = address, cores, devices

    def run(self, job: Job, make: MakeShard, numbers: list[int], advance: Advance) -> None:
        if not numbers:
            return
        ray = connect(self.address, "engine.address")
        resources = {"num_cpus": self.cores, "num_gpus": self.devices}
        check_resources(ray, 1, resources, "lower engine.cores or engine.devices, or add machines")
        variables = dict.fromkeys(THREADS, str(self.cores)) | ({} if self.devices else {"CUDA_VISIBLE_DEVICES": ""})
        task = ray.remote(make_shard).options(**resources, max_retries=RESTARTS, runtime_env={"env_vars": variables})
        waiting = [task.remote(job, Path.cwd(), version("trime"), number) for number in numbers]
        try:
            while waiting:
                (finished,), waiting = ray.wait(waiting)
                advance(ray.get(finished))
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, UserError):
                raise
            raise UserError(str(error.cause)) from None
        except ray.exceptions.RayError as error:
            raise UserError(
                f"engine=ray: a shard of {job.name} could not be made, after {RESTARTS} retries at most "
                f"({str(error).splitlines()[0]}): if memory ran out, raise engine.cores, so that fewer share a machine; "
                "the same command resumes"
            ) from None
        finally:
            for shard in waiting:
                ray.cancel(shard, force=True)


OPENED: dict[tuple[Any, ...], MakeShard] = {}  # of this process: the job that a Ray worker opened last, for its next shard


def make_shard(job: Job, place: Path, release: str, number: int) -> int:
    """Make a shard in a Ray worker, in the directory ``place`` of the command; return how much work it was.

    UserError with another version of trime, or without the same disk.
    """
    if job[1:] not in OPENED:
        node, mine = socket.gethostname(), version("trime")
        if mine != release:
            raise UserError(f"engine=ray: {node} has trime {mine}, the command {release}: install the same on all")
        if not (place / job.folder).is_dir():
            raise UserError(f"engine=ray: {node} does not see {place / job.folder}: machines must share a disk")
        os.chdir(place)
        OPENED.clear()
        OPENED[job[1:]] = job.open(job)
    amounts: list[int] = []
    OPENED[job[1:]](number, amounts.append)
    return sum(amounts)
