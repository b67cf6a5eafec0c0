"""Parts of the external memory on the workers of a Ray cluster (or of Ray on this machine), searched as one.

Folders of the datastore and of its index must be readable by every worker under the same path: on several machines, a shared
disk. A worker that dies is started again by Ray, opens its part anew and is asked again; when that fails, so does the search.
"""

from __future__ import annotations

import os
import socket
from functools import cached_property
from typing import Any

import torch

from trime.kernels.cpu import prepare_cpu
from trime.memory.retrieval.faiss_index import use_threads
from trime.memory.retrieval.search import Search, combined_kind, merge_results
from trime.memory.retrieval.sharded import IndexPart
from trime.types import Float, Int, Tensor, UserError

RESTARTS = 3  # of a worker in a run, before the search fails
CONNECTING = 10  # seconds until an address that does not answer is an error
STARTING = 600  # seconds until workers must have opened their parts
QUERIES = 4096  # of a batch: workers search the next one while answers to the last travel and are merged


class RayWorker:
    """One part, on ``cores`` cores or a device of its own."""

    def __init__(self, part: IndexPart, nprobe: int, device: str, cores: int):
        self.part, self.nprobe, self.device = part, nprobe, device
        prepare_cpu()
        use_threads(cores)

    @cached_property
    def search(self) -> Search:
        """Opened when it is first asked for, so that what is wrong is told in the answer."""
        for folder in (self.part.store, *[self.part.folder] * bool(self.part.factory)):
            if not folder.is_dir():
                raise UserError(f"{folder} is not on the disk of a worker: all machines must see outputs under one path")
        return self.part.search(self.nprobe, self.device)

    def kind(self) -> str:
        """Exact or approximate."""
        return self.search.kind

    def process(self) -> int:
        """Its number with the operating system."""
        return os.getpid()

    def nearest(self, query: Any, k: int) -> tuple[Any, Any]:
        """As NumPy's arrays, entries numbered from the part's first."""
        score, index = self.search.nearest(torch.tensor(query, device=self.device), k)
        return score.cpu().numpy(), index.int().cpu().numpy()  # of a part, below 2^31


class RaySearch:
    """A search that asks a worker for each part and merges their answers exactly."""

    def __init__(self, parts: list[IndexPart], nprobe: int, device: str, address: str | None, cores: int):
        self.ray = connect(address)
        own = {"num_cpus": cores if address else 0, "num_gpus": int(device == "cuda")}  # here, workers share what there is
        check_resources([node["Resources"] for node in self.ray.nodes() if node["Alive"]], len(parts), own)
        actor = self.ray.remote(RayWorker).options(**own, max_restarts=RESTARTS, max_task_retries=RESTARTS)
        self.workers = [actor.remote(part.absolute(), nprobe, device, cores) for part in parts]
        self.firsts = [part.first for part in parts]
        self.kind = combined_kind(self.answers([worker.kind.remote() for worker in self.workers], STARTING))

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        batches = [self.ray.put(part.float().cpu().numpy()) for part in query.split(QUERIES)]
        asked = [[worker.nearest.remote(batch, k) for worker in self.workers] for batch in batches]
        scores, numbers = [], []
        for answers in asked:
            found = [(torch.tensor(score), torch.tensor(number).long()) for score, number in self.answers(answers)]
            score, number = merge_results(found, self.firsts, k)
            scores.append(score)
            numbers.append(number)
        return torch.cat(scores).to(query.device), torch.cat(numbers).to(query.device)

    def answers(self, asked: list[Any], seconds: float | None = None) -> list[Any]:
        """What workers answer; UserError where one could not."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(asked, timeout=seconds)
        except errors.GetTimeoutError:
            told = f"workers did not start within {seconds:.0f} seconds: other jobs may hold the cluster (see `ray status`)"
        except errors.RayTaskError as error:
            if not isinstance(error.cause, UserError):
                raise
            told = str(error.cause)
        except errors.RayError as error:
            told = (
                f"a worker of the external memory is lost, after {RESTARTS} restarts at most ({str(error).splitlines()[0]}): "
                "if there was too little memory, raise index.parts; the same command goes on"
            )
        self.close()
        raise UserError(told)

    def close(self) -> None:
        """Gives back what the workers hold."""
        for worker in self.workers:
            self.ray.kill(worker)
        last.clear()


last: dict[tuple[Any, ...], RaySearch] = {}  # the cluster that was asked for last


def open_ray_search(parts: list[IndexPart], nprobe: int, device: str, address: str | None, cores: int) -> RaySearch:
    """The workers of an index; those that are there already, where it is the one that was asked for last."""
    key = (*parts, nprobe, device, address, cores)
    if key not in last:
        for other in [*last.values()]:
            other.close()
        last[key] = RaySearch(parts, nprobe, device, address, cores)
    return last[key]


def connect(address: str | None) -> Any:
    """Ray, started on this machine or connected to a cluster."""
    import ray  # checks.py tells where it is missing, before anything is made

    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of workers that fail alike: the first one's is told
    if not ray.is_initialized():
        try:
            if address and address != "auto":  # Ray would try for minutes, then end the process
                host, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection((host, int(port)), timeout=CONNECTING).close()
            ray.init(address=address or "local", num_cpus=None if address else 1, log_to_driver=False, include_dashboard=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"index.address={address}: no Ray cluster answers there ({str(error).splitlines()[0]})") from None
    return ray


def check_resources(nodes: list[dict[str, float]], parts: int, own: dict[str, int]) -> None:
    """UserError where machines have too little for one worker a part: Ray would wait for ever."""
    for name, wanted in (("CPU", own["num_cpus"]), ("GPU", own["num_gpus"])):
        room = sum(int(has.get(name, 0) // wanted) for has in nodes) if wanted else parts
        if room < parts:
            raise UserError(
                f"{parts} workers of {wanted} {name} each, and {len(nodes)} machines have room for {room}: "
                "lower index.parts or index.cores, or add machines"
            )
