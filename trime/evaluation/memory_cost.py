"""What a memory costs: its time, and the most that it held."""

from __future__ import annotations

import time
from typing import Any

import torch

from trime.memory.base import Entries, Memory, Window
from trime.types import Float, Mass, Tensor


class Metered(Memory):
    """Another memory that is timed: answers are its own; ``seconds`` is how long they took, ``most`` the most bytes held."""

    def __init__(self, memory: Memory):
        self.memory, self.seconds, self.most = memory, 0.0, 0
        self.sizes, self.own_experts = memory.sizes, memory.own_experts
        self.looks_ahead, self.fills, self.remembers_all = memory.looks_ahead, memory.fills, memory.remembers_all

    def reset(self) -> None:
        self.memory.reset()

    def ahead(self, windows: list[Window]) -> list[Any]:
        return self.timed(self.memory.ahead, windows)

    def evidence(self, window: Window, divisor: Float[Tensor, " t"], ahead: Any = None) -> Mass:
        return self.timed(self.memory.evidence, window, divisor, ahead)

    def experts(self, window: Window, divisor: Float[Tensor, " t"], ahead: Any = None) -> Mass:
        return self.timed(self.memory.experts, window, divisor, ahead)

    def write(self, window: Window) -> None:
        self.timed(self.memory.write, window)
        self.most = max(self.most, self.memory.bytes)

    def entries(self, window: Window) -> Entries:
        return self.memory.entries(window)

    @property
    def bytes(self) -> int:
        return self.most

    def timed(self, function: Any, *given: Any) -> Any:
        """Call a function; what it took counts."""
        started = now()
        result = function(*given)
        self.seconds += now() - started
        return result


def now() -> float:
    """Return seconds, after the device has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
