"""The long-term memory at test: the last M contexts, or those that an eviction policy keeps."""

from __future__ import annotations

from typing import Any

from trime.checks import check_choice, check_object
from trime.choices import METRICS, Metric
from trime.eviction.base import EvictionPolicy
from trime.memory.base import Entries, Memory, StateScope, Window
from trime.memory.bounded import MemoryState
from trime.memory.evicting import EvictingTokenMemory
from trime.memory.fifo import FifoTokenMemory
from trime.memory.local import context_entries
from trime.types import Float, LogMass, Tensor


class LongMemory(Memory):
    """The contexts that ``policy`` keeps.

    A policy that keeps the last entries is served by one memory for all sizes (``fifo``), unless ``selective``; others need
    a memory for each size (``evicting``). UserError unless ``sizes`` are positive and rising.
    """

    def __init__(
        self,
        sizes: list[int],
        policy: EvictionPolicy,
        across_documents: bool = False,
        include_window: bool = False,
        metric: Metric = "ip",
        selective: bool = False,
    ):
        check_object("policy", policy, EvictionPolicy, "FIFO()")
        check_choice("metric", metric, METRICS)
        self.state_scope = StateScope.CORPUS if across_documents else StateScope.DOCUMENT
        self.memory: FifoTokenMemory | EvictingTokenMemory
        if policy.keeps_newest and not selective:
            self.memory = FifoTokenMemory(sizes, across_documents, include_window, metric)
        else:
            self.memory = EvictingTokenMemory(sizes, policy, across_documents, include_window, metric)

    @property
    def sizes(self) -> list[int]:  # type: ignore[override]
        return self.memory.sizes

    @property
    def depends_on_whole_document(self) -> bool:  # type: ignore[override]
        return isinstance(self.memory, EvictingTokenMemory)

    def states_for(self, window: Window) -> list[MemoryState]:
        """Return the states that a window sees, where each size has its own; none before the first insertion."""
        evicting = isinstance(self.memory, EvictingTokenMemory)
        return (self.memory.content_for(window.query, window.num_context).states or []) if evicting else []  # type: ignore[union-attr]

    def reset(self) -> None:
        self.memory.reset()

    def mass(self, window: Window, divisor: Float[Tensor, " t"], prefetched: Any = None) -> LogMass:
        return self.memory.mass(window.query, divisor, overlap=window.num_context)

    def write(self, window: Window) -> None:
        if isinstance(self.memory, FifoTokenMemory):
            self.memory.write(window.scored, keep_extra=len(window.contexts.token))
        else:
            self.memory.write(window.scored, overlap=window.num_context)

    @property
    def bytes(self) -> int:
        return self.memory.bytes

    def entries(self, window: Window) -> Entries:
        query = window.contexts.take(slice(-1, None))
        return context_entries(window, self.memory.entries(query, overlap=window.num_context), self.memory.metric)
