"""Least recently used: the score is the position of the last query that retrieved the entry."""

from __future__ import annotations

import torch

from trime.eviction.base import EvictionPolicy, Summary, latest, used
from trime.eviction.initial import Initial
from trime.types import Attended


class LRU(EvictionPolicy):
    """``top_k``: how many of the entries that a query sees count as used; null: those that the layer retrieved."""

    def __init__(self, initial: Initial, top_k: int | None = None, newest_first: bool = True):
        super().__init__(initial, newest_first)
        self.top_k = top_k

    def added(self, summary: Summary, block: Attended) -> Summary:
        hit = used(block, self.top_k).any(1)
        position = block.position[:, :, None].double().expand(hit.shape).masked_fill(~hit, -1.0).amax(1)
        seen = summary.seen | hit.any(1)
        return Summary(torch.maximum(summary.value, position), seen, latest(summary, block))
