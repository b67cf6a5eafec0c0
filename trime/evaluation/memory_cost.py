"""The cost of a memory: its time and its peak size."""

from __future__ import annotations

import time
from typing import Any

import torch

from trime.memory.base import Entries, Memory, Window
from trime.types import Float, LogMass, Tensor


class MeteredMemory(Memory):
    """A wrapper around a memory that records ``seconds``, the time of its calls, and ``peak_bytes``."""

    def __init__(self, memory: Memory):
        self.memory, self.seconds, self.peak_bytes = memory, 0.0, 0
        self.sizes, self.expert_names = memory.sizes, memory.expert_names
        self.supports_batched_queries, self.state_scope = memory.supports_batched_queries, memory.state_scope
        self.depends_on_whole_document = memory.depends_on_whole_document

    def reset(self) -> None:
        self.memory.reset()

    def prefetch(self, windows: list[Window]) -> list[Any]:
        return self.timed(self.memory.prefetch, windows)

    def mass(self, window: Window, divisor: Float[Tensor, " t"], prefetched: Any = None) -> LogMass:
        return self.timed(self.memory.mass, window, divisor, prefetched)

    def experts(self, window: Window, divisor: Float[Tensor, " t"], prefetched: Any = None) -> LogMass:
        return self.timed(self.memory.experts, window, divisor, prefetched)

    def write(self, window: Window) -> None:
        self.timed(self.memory.write, window)
        self.peak_bytes = max(self.peak_bytes, self.memory.bytes)

    def entries(self, window: Window) -> Entries:
        return self.memory.entries(window)

    @property
    def bytes(self) -> int:
        return self.peak_bytes

    def timed(self, function: Any, *arguments: Any) -> Any:
        """Call a function and add its duration to ``seconds``."""
        started = now()
        result = function(*arguments)
        self.seconds += now() - started
        return result


def now() -> float:
    """Return the time in seconds, after all work queued on the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
