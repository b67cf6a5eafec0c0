"""Parts are made by the workers of a Ray cluster, or of Ray on this machine; Ray gives those of a lost worker to others."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any, NamedTuple

import trime
from trime.engines.base import Advance, Engine, Job, MakePart
from trime.engines.worker import LOST, THREADS, make_part
from trime.errors import UserError
from trime.io import partial_of
from trime.places import complete_files

CONNECTING = 10  # seconds to wait for an address to answer


class RayCluster(Engine):
    """As many workers as the cluster at ``address`` has room for, of ``cores`` cores and ``devices`` CUDA devices each.

    Every machine must have the same version of trime. It must see the folders of a run under the same path, unless
    ``paths.data`` and ``paths.outputs`` are URLs: then it has copies of its own, and what it makes comes over the URL.
    """

    def __init__(self, address: str | None = None, cores: int = 1, devices: int = 0):
        self.address, self.cores, self.devices = address, cores, devices

    def run(self, job: Job, make: MakePart, numbers: list[int], advance: Advance) -> None:
        if not numbers:
            return
        ray = connect(self.address, "engine.address")
        resources = {"num_cpus": self.cores, "num_gpus": self.devices}
        check_resources(ray, 1, resources, "lower engine.cores or engine.devices, or add machines")
        variables = dict.fromkeys(THREADS, str(self.cores)) | ({} if self.devices else {"CUDA_VISIBLE_DEVICES": ""})
        options = resources | {"max_retries": LOST, "runtime_env": {"env_vars": variables}}
        if job.place:
            job.place.upload(job.reads, job.folder)
        remote = ray.remote(make_part_on_node).options(**options)
        pending = {remote.remote(self.origin(), job, number): number for number in numbers}
        try:
            while pending:
                (done,), _ = ray.wait([*pending], num_returns=1)
                amount = ray.get(done)
                if job.place:
                    job.place.download(into=job.folder)
                advance(amount)
                del pending[done]
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, UserError):
                raise
            raise UserError(str(error.cause)) from None
        except ray.exceptions.RayError as error:
            raise UserError(
                f"engine=ray: a part of {job.name} could not be made, after {LOST} retries at most "
                f"({str(error).splitlines()[0]}): if memory ran out, raise engine.cores, so that fewer share a machine; "
                "the same command resumes"
            ) from None
        finally:
            for part in pending:
                ray.cancel(part, force=True)

    def origin(self) -> Origin:
        """Return what workers need to know of this process."""
        return Origin(trime.__version__, Path.cwd())


class Origin(NamedTuple):
    """Where a job comes from: the version of trime there, and its working directory."""

    version: str
    folder: Path


def make_part_on_node(origin: Origin, job: Job, number: int) -> int:
    """Make a part on a machine of the cluster; UserError if it has another version, or does not see the same folders."""
    node = socket.gethostname()
    if trime.__version__ != origin.version:
        raise UserError(
            f"engine=ray: {node} has trime {trime.__version__}, and this machine {origin.version}: install the same on all"
        )
    if job.place:
        local = job.place.local
        copy = partial_of(local.with_name(f"{local.name}.{os.getpid()}"))  # of this process, which sends what it made itself
        copy.mkdir(parents=True, exist_ok=True)
        try:
            job.place.download(job.reads, copy)
            amount = make_part(job._replace(folder=copy), number)
            job.place.upload([name for name in complete_files(copy) if name not in job.reads], copy)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        return amount
    if not (origin.folder / job.folder).is_dir():
        raise UserError(
            f"engine=ray: {node} does not see {origin.folder / job.folder}: all machines must share a disk, or paths.data and "
            "paths.outputs be URLs"
        )
    os.chdir(origin.folder)
    return make_part(job, number)


def connect(address: str | None, setting: str) -> Any:
    """Return the module ray, connected to a cluster or started on this machine; UserError if no cluster answers."""
    import ray  # preflight.py reports a missing package before anything is run

    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # workers fail alike: the first error is enough
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a local Ray; with its own, 15, they wait while a model computes
    if not ray.is_initialized():
        try:
            if address and address != "auto":  # Ray would try for minutes, then exit
                host, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection((host, int(port)), timeout=CONNECTING).close()
            ray.init(address=address or "local", log_to_driver=False, include_dashboard=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{setting}={address}: no Ray cluster answers there ({str(error).splitlines()[0]})") from None
    return ray


def check_resources(ray: Any, workers: int, needed: dict[str, int], remedy: str) -> None:
    """Raise a UserError if the machines have no room for so many workers; Ray would wait forever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, count in (("CPU", needed["num_cpus"]), ("GPU", needed["num_gpus"])):
        room = sum(int(node.get(name, 0) // count) for node in nodes) if count else workers
        if room < workers:
            raise UserError(
                f"a worker needs {count} {name}: {len(nodes)} machines have room for {room} of {workers} workers: {remedy}"
            )
