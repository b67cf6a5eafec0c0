"""The local memory at test: the earlier contexts of the same window (TRIME Eq. 2; the continuous cache)."""

from __future__ import annotations

from typing import Any

from trime.common.checks import check_choice
from trime.common.choices import METRICS, Metric
from trime.common.types import Contexts, Float, LogMass, Tensor
from trime.token_memory.similarity import similarity
from trime.token_memory.test.base import Entries, Memory, Window
from trime.token_memory.train.objective.blockwise import blockwise_mass
from trime.token_memory.train.visibility import Local


class LocalMemory(Memory):
    """The earlier contexts of each window; ``metric``: ip, l2 or cosine."""

    metric: Metric

    def __init__(self, metric: Metric = "ip"):
        check_choice("metric", metric, METRICS)
        self.metric = metric
        self.window_bytes = 0

    def mass(self, window: Window, divisor: Float[Tensor, " t"], prefetched: Any = None) -> LogMass:
        mass = blockwise_mass(window.query, window.contexts, Local(), divisor, metric=self.metric)
        return LogMass(mass.target[None], mass.total[None])

    def write(self, window: Window) -> None:
        self.window_bytes = window.contexts.bytes

    @property
    def bytes(self) -> int:
        return self.window_bytes

    def entries(self, window: Window) -> Entries:
        return context_entries(window, window.contexts.take(slice(0, -1)), self.metric)


def context_entries(window: Window, memory: Contexts, metric: str) -> Entries:
    """Return contexts as entries, with their similarities to the last context of a window."""
    query = window.contexts.take(slice(-1, None))
    return Entries(similarity(query.g, memory.g.to(query.g), metric)[0], memory.token, memory.positions.position)
