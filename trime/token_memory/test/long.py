"""The long-term memory at test: the last M contexts, or those that an eviction policy keeps."""

from __future__ import annotations

from typing import Any

from trime.common.checks import check_choice, check_object
from trime.common.choices import METRICS, Metric
from trime.common.types import Float, LogMass, Tensor
from trime.kv.eviction.base import EvictionPolicy
from trime.token_memory.test.base import Entries, Memory, StateScope, Window
from trime.token_memory.test.evicting import EvictingTokenMemory, FifoTokenMemory
from trime.token_memory.test.local import context_entries


class LongMemory(Memory):
    """The contexts that ``policy`` keeps.

    A policy that keeps the last entries is served by one memory for all sizes (``fifo``); others need a memory for each size
    (``evicting``). UserError unless ``sizes`` are positive and rising.
    """

    metric: Metric

    def __init__(
        self,
        sizes: list[int],
        policy: EvictionPolicy,
        across_documents: bool = False,
        include_window: bool = False,
        metric: Metric = "ip",
    ):
        check_object("policy", policy, EvictionPolicy, "FIFO()")
        check_choice("metric", metric, METRICS)
        self.state_scope = StateScope.CORPUS if across_documents else StateScope.DOCUMENT
        self.include_window, self.metric = include_window, metric
        self.memory: FifoTokenMemory | EvictingTokenMemory
        if policy.keeps_newest:
            self.memory = FifoTokenMemory(sizes, across_documents, include_window, metric)
        else:
            self.memory = EvictingTokenMemory(sizes, policy, across_documents, include_window, metric)
        self.sizes, self.depends_on_whole_document = self.memory.sizes, isinstance(self.memory, EvictingTokenMemory)

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
        return context_entries(window, self.memory.entries(query, overlap=window.num_context), self.metric)
