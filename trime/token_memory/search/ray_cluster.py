"""Search of the external memory in slices, on the workers of a Ray cluster or of Ray on this machine.

Every worker reads the datastore and its index under the same path, on a disk that machines share. Ray restarts a worker that
dies, which opens its slice again and repeats the search; if that fails, so does the search.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, cycle
from typing import Any

import torch

from trime.common.choices import THREADS
from trime.common.cpu import prepare_cpu
from trime.common.types import Float, Int, Tensor
from trime.errors import UserError
from trime.token_memory.search.faiss_index import use_threads
from trime.token_memory.search.index import IndexSlice
from trime.token_memory.search.ivf import Cells, IVFSearch
from trime.token_memory.search.search import Search, merge_results

CONNECTING = 10  # seconds to wait for an address to answer
RESTARTS = 3  # of a worker, before its work fails
STARTING = 600  # seconds to wait for workers to start
QUERIES = 4096  # in a batch: workers search the next batch while the results of the last are sent and merged


class RayWorker:
    """A Ray actor that searches one slice, on ``cores`` cores or on its own device."""

    def __init__(self, index: IndexSlice, nprobe: int, device: str, cores: int):
        self.index, self.nprobe, self.device = index, nprobe, device
        if device == "cpu":  # it sets the precision of matrix products, which would hold for a GPU, too
            prepare_cpu()
        use_threads(cores)

    @cached_property
    def search(self) -> Search:
        """Open the slice at the first call, so that an error is raised in the result of that call."""
        index = self.index
        for folder in [index.folder] if index.by_cells else [index.store, *[index.folder] * bool(index.factory)]:
            if not folder.is_dir():
                raise UserError(f"{folder} is not on the disk of a worker: all machines must see paths.outputs under one path")
        return index.search(self.nprobe, self.device)

    def kind(self) -> str:
        """Return ``exact`` or ``approximate``."""
        return self.search.kind

    def process(self) -> int:
        """Return the process id of the worker."""
        return os.getpid()

    def nearest(self, request: tuple[Any, Any], k: int) -> tuple[Any, Any]:
        """Return similarities and numbers as NumPy arrays.

        ``request`` has queries [n d] and, where slices are cells, the cells that they visit [n p], as NumPy arrays. Otherwise
        numbers are counted from the slice's first entry.
        """
        query, search = torch.tensor(request[0]), self.search
        if isinstance(search, IVFSearch) and request[1] is not None:
            score, number = search.nearest_in(query, torch.tensor(request[1]).long(), k)
            return score.numpy(), number.numpy()
        score, number = search.nearest(query.to(self.device), k)
        return score.cpu().numpy(), number.int().cpu().numpy()  # numbers within a slice are below 2^31


class RaySearch:
    """A search by workers that hold a slice each, whose results are merged exactly.

    ``replicas`` workers hold the same slice and are asked in turns, so that a slow one is not asked each time. UserError
    without a cluster at ``address``, with too few resources, or when a worker is lost for good.
    """

    def __init__(
        self,
        slices: Sequence[IndexSlice],
        nprobe: int,
        device: str,
        address: str | None,
        cores: int,
        replicas: int = 1,
    ):
        self.ray = connect(address, "index.address")
        resources = {"num_cpus": cores if address else 0, "num_gpus": int(device == "cuda")}  # local workers share cores
        remedy = "lower index.parts, index.replicas or index.cores, or add machines"
        check_resources(self.ray, len(slices) * replicas, resources, remedy)
        threads = {"env_vars": dict.fromkeys(THREADS, str(cores))}  # more than its cores would wait for one another
        restarts = {"max_restarts": RESTARTS, "max_task_retries": RESTARTS}
        actor = self.ray.remote(RayWorker).options(**resources, **restarts, runtime_env=threads)
        # Workers have another working directory.
        sent = [one._replace(store=one.store.absolute(), folder=one.folder.absolute()) for one in slices]
        whole = [[actor.remote(one, nprobe, device, cores) for one in sent] for _ in range(replicas)]
        self.workers, self.turns = [*chain(*whole)], cycle(whole)
        self.firsts = [0 if one.by_cells else one.first for one in slices]
        self.cells = Cells(slices[0].folder, slices[0].metric, nprobe) if slices[0].by_cells else None
        self.results([worker.process.remote() for worker in self.workers], STARTING)
        kinds = {*self.results([worker.kind.remote() for worker in self.workers])}  # large slices take long to open
        self.kind = "exact" if kinds == {"exact"} else "approximate"

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        return self.begin(query, k)()

    def begin(self, query: Float[Tensor, "n d"], k: int) -> Callable[[], tuple[Tensor, Tensor]]:
        """Start a search and return a callable that waits for its results."""
        pending = []
        for batch in query.split(QUERIES):
            queries, visited = (batch.float().cpu(), None) if self.cells is None else self.cells.visited(batch)
            sent = self.ray.put((queries.numpy(), None if visited is None else visited.int().numpy()))
            pending.append([worker.nearest.remote(sent, k) for worker in next(self.turns)])

        def wait() -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
            found = []
            for futures in pending:
                results = [(torch.tensor(score), torch.tensor(number)) for score, number in self.results(futures)]
                found.append(merge_results(results, self.firsts, k))
            scores, numbers = zip(*found, strict=True)
            return torch.cat(scores).to(query.device), torch.cat(numbers).to(query.device)

        return wait

    def results(self, futures: list[Any], seconds: float | None = None) -> list[Any]:
        """Wait for the workers' results; UserError if one of them failed."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(futures, timeout=seconds)
        except errors.GetTimeoutError:
            message = f"workers did not start within {seconds:.0f} seconds: other jobs may hold the cluster (see `ray status`)"
        except errors.RayTaskError as error:
            if not isinstance(error.cause, UserError):
                raise
            message = str(error.cause)
        except errors.RayError as error:
            message = (
                f"a worker of the external memory is lost, after {RESTARTS} restarts at most ({str(error).splitlines()[0]}): "
                "if there was too little memory, raise index.parts; the same command resumes"
            )
        self.close()
        raise UserError(message)

    def close(self) -> None:
        """Stop the workers and free their resources."""
        for worker in self.workers:
            with suppress(self.ray.exceptions.ActorHandleNotFoundError):  # of a session of Ray that has ended
                self.ray.kill(worker)
        open_searches.clear()


open_searches: dict[tuple[Any, ...], RaySearch] = {}  # the one opened last, if it is still open


def open_ray_search(
    slices: Sequence[IndexSlice], nprobe: int, device: str, address: str | None, cores: int, replicas: int
) -> RaySearch:
    """Return the search of an index; if it is the one opened last, its workers are used again, else those are stopped."""
    key = (*slices, nprobe, device, address, cores, replicas)
    if key not in open_searches:
        for other in [*open_searches.values()]:
            other.close()
        open_searches[key] = RaySearch(slices, nprobe, device, address, cores, replicas)
    return open_searches[key]


def connect(address: str | None, setting: str) -> Any:
    """Return the module ray, connected to a cluster or started on this machine; UserError if no cluster answers."""
    import ray  # preflight.py reports a missing package before anything is run
    import ray.util

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


def check_resources(ray: Any, workers: int, needed: dict[str, int], remedy: str) -> int:
    """Return for how many workers the machines have room; UserError for fewer than ``workers``, as Ray would wait forever."""
    nodes, rooms = [node["Resources"] for node in ray.nodes() if node["Alive"]], []
    for name, count in (("CPU", needed["num_cpus"]), ("GPU", needed["num_gpus"])):
        if count:
            rooms.append(sum(int(node.get(name, 0) // count) for node in nodes))
            if rooms[-1] < workers:
                raise UserError(
                    f"a worker needs {count} {name}: {len(nodes)} machines have room for {rooms[-1]} of {workers} workers: "
                    f"{remedy}"
                )
    return min(rooms, default=workers)
