"""Attention sinks: the first entries of a document stay for good, first in first out for the others (StreamingLLM)."""

from __future__ import annotations

import math

from trime.eviction.base import EvictionPolicy
from trime.eviction.initial import OwnPosition
from trime.types import Float, Int, Ranking, Tensor


class Sink(EvictionPolicy):
    """The first ``sinks`` entries of a row and the newest ones; the sinks count as part of the memory."""

    by_attention = False

    def __init__(self, sinks: int = 4):
        super().__init__(OwnPosition())
        if sinks < 0:
            raise ValueError(f"eviction.sinks={sinks} is no number of entries")
        self.sinks = sinks

    def admit(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Infinite for the first entries that were ever written to the row."""
        valid = position >= 0
        number = ranking.written[:, None] + valid.cumsum(1) - 1
        return super().admit(ranking, position).masked_fill(valid & (number < self.sinks), math.inf)
