"""How long machines wait when each of them searches a part of an index for all others, by simulation.

Every machine evaluates text of its own. It sends its queries, in requests, to all machines, and each of them searches its part
for one request after the other, in the order in which they arrive. A request is done when the last machine has answered. Its
sender compares its queries with the centroids, while others search. Two requests of a machine are under way at a time, as in an
evaluation.

What a request costs on each machine is not drawn from a distribution: it is measured for requests of consecutive contexts, on
the parts of a small index. How uneven parts are, because consecutive queries visit the same cells, is in these figures.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from trime.inspection.growth import least_errors
from trime.memory.retrieval.datastore import Keys
from trime.memory.retrieval.ivf import Cells
from trime.memory.retrieval.ray_cluster import QUERIES
from trime.memory.retrieval.search import Search
from trime.memory.retrieval.sharded import CellsPart
from trime.types import Float, Tensor

UNDER_WAY = 2  # requests of each machine
REQUESTS = 200  # of each machine, in a simulation
MEASURED = 8  # requests that are timed
STARTING, DISK = 10.0, 1e9  # assumed: seconds to start a process, bytes a second in which it reads its part


class Trouble(NamedTuple):
    """What happens to the first machine: it takes ``slowness`` times as long, or is away for some seconds."""

    name: str
    slowness: float = 1.0
    lost_at: float = math.inf
    lost_for: float = 0.0


class Waiting(NamedTuple):
    """When everything was done, and for how long each request was under way, in seconds."""

    seconds: float
    requests: np.ndarray


def simulate(work: Float[np.ndarray, "r m"], own: float, trouble: Trouble) -> Waiting:
    """Return how long ``r`` requests take, which as many machines send in turns as search them.

    ``work``: the seconds of each request on each machine; ``own``: those of its sender.
    """
    machines = work.shape[1]
    slowness = np.ones(machines)
    slowness[0] = trouble.slowness
    remaining = [iter(work[sender::machines] * slowness) for sender in range(machines)]
    free, ready, under_way = np.zeros(machines), [0.0] * machines, []
    events = [(0.0, sender) for sender in range(machines) for _ in range(UNDER_WAY)]  # when who sends a request
    while events:
        sent, sender = heapq.heappop(events)
        if (seconds := next(remaining[sender], None)) is None:
            continue
        begin = np.maximum(free, sent)
        back = trouble.lost_at + trouble.lost_for
        if begin[0] < back and begin[0] + seconds[0] > trouble.lost_at:
            begin[0] = back  # what was being searched, and what came meanwhile, is searched after that
        free = begin + seconds
        under_way.append(free.max() - sent)
        ready[sender] = max(ready[sender], free.max()) + own
        heapq.heappush(events, (ready[sender], sender))
    return Waiting(max(ready), np.array(under_way))


class SearchCost(NamedTuple):
    """What requests of ``queries`` queries cost: fixed seconds on each part, and seconds a comparison of query and key.

    ``compared``: how many comparisons each measured request [r] takes on each machine [m].
    """

    queries: int
    fixed: float
    comparison: float
    compared: Float[np.ndarray, "r m"]

    def work(self, growth: float) -> Float[np.ndarray, "r m"]:
        """Return the seconds of each request on each machine where cells hold ``growth`` times as many keys."""
        return self.fixed + self.comparison * growth * self.compared


def request_size(keys: Keys) -> int:
    """Return how many queries a request has: as many as Ray's workers are sent at once, if there are so many entries."""
    return min(QUERIES, len(keys))


def requests_of(keys: Keys) -> Iterator[Float[Tensor, "q d"]]:
    """Yield requests for consecutive entries of a store, at even distances."""
    queries = request_size(keys)
    for first in np.linspace(0, len(keys) - queries, MEASURED).astype(int).tolist():
        yield keys.take(torch.arange(first, first + queries)[:, None]).squeeze(1)


def cost_by_cells(keys: Keys, parts: Sequence[CellsPart], nprobe: int, k: int) -> SearchCost:
    """Search the parts of an index by cells for stored keys, and return what requests cost."""
    cells = Cells(parts[0].folder, parts[0].metric, nprobe)
    sizes = torch.from_numpy(np.diff(cells.start))
    searches = [part.search(nprobe) for part in parts]
    seconds, compared = np.zeros((2, MEASURED, len(parts)))
    for number, query in enumerate(requests_of(keys)):
        local, visited = cells.visited(query)
        for place, (part, search) in enumerate(zip(parts, searches, strict=True)):
            inside = (visited >= part.first) & (visited < part.last)
            compared[number, place] = int(sizes[visited[inside]].sum())
            started = time.perf_counter()
            search.nearest_in(local, visited, k)
            seconds[number, place] = time.perf_counter() - started
    own, times = compared[1:].flatten(), seconds[1:].flatten()  # without the first request, which reads the files
    fixed, comparison = least_errors(np.stack([np.ones_like(own), own], 1) / times[:, None], np.ones_like(times))
    return SearchCost(request_size(keys), fixed, comparison, compared)


def cost_by_rows(keys: Keys, search: Search, k: int, comparisons: float, on_machine: float, machines: int) -> SearchCost:
    """Search a whole index for stored keys, and return what requests cost on machines that have equally many rows each.

    A query makes so many ``comparisons`` there, and ``on_machine`` of them on each machine of the planned size.
    """
    times = []
    for query in requests_of(keys):
        started = time.perf_counter()
        search.nearest(query, k)
        times.append(time.perf_counter() - started)
    comparison = float(np.median(times[1:])) / comparisons
    return SearchCost(request_size(keys), 0.0, comparison, np.full((1, machines), on_machine))


def searching(cost: SearchCost, growth: float, own: float, part_bytes: float) -> list[dict[str, float | str]]:
    """Return throughput and waiting of simulated machines: all alike, one of them slow, and one of them lost for a while.

    ``growth``: how many times as many keys cells hold as where costs were measured; ``own``: a sender's seconds a request;
    ``part_bytes``: of a machine's part, which one that was lost reads again.
    """
    measured = cost.work(growth)
    machines = measured.shape[1]
    work = measured[np.random.default_rng(0).integers(0, len(measured), REQUESTS * machines)]
    ideal = max(work.sum() / machines, own * REQUESTS)
    smooth = simulate(work, own, Trouble("all alike"))
    outage = STARTING + part_bytes / DISK
    troubles = [Trouble("one at half the speed", 2.0), Trouble("one lost, and started again", 1.0, smooth.seconds / 2, outage)]
    outcomes = [("all alike", smooth), *((trouble.name, simulate(work, own, trouble)) for trouble in troubles)]
    return [
        {
            "machines_are": name,
            "queries_per_second": cost.queries * len(work) / waiting.seconds,
            "of_ideal": ideal / waiting.seconds,
            "request_seconds": float(np.median(waiting.requests)),
            "slowest_percent_seconds": float(np.quantile(waiting.requests, 0.99)),
            "seconds_more": waiting.seconds - smooth.seconds,
        }
        for name, waiting in outcomes
    ]
