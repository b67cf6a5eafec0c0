"""Attention sinks: the first entries of a document always stay, the others are first in, first out (StreamingLLM)."""

from __future__ import annotations

import math

from trime.eviction.base import EvictionPolicy
from trime.eviction.initial import OwnPosition
from trime.types import Float, Int, Ranking, Tensor


class Sink(EvictionPolicy):
    """Keep the first ``sinks`` entries of a row and the newest others; sinks count towards the memory's size."""

    uses_attention = False

    def __init__(self, sinks: int = 4):
        super().__init__(OwnPosition())
        if sinks < 0:
            raise ValueError(f"eviction.sinks={sinks} must not be negative: it is a number of entries")
        self.sinks = sinks

    def admit(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Return infinity for the first ``sinks`` entries ever written to the row, and positions for all others."""
        valid = position >= 0
        count = ranking.written[:, None] + valid.cumsum(1) - 1
        return super().admit(ranking, position).masked_fill(valid & (count < self.sinks), math.inf)
