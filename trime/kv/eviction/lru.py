"""Least recently used: the score is the position of the last query that retrieved the entry."""

from __future__ import annotations

import torch

from trime.common.types import AttentionBlock
from trime.kv.eviction.base import EvictionPolicy, Summary, check_top_k, last_position, retrieved_entries
from trime.kv.eviction.initial import Initial, OwnPosition


class LRU(EvictionPolicy):
    """Score entries by their last retrieval, as ``retrieved_entries`` decides with ``top_k`` and ``fallback_top_k``."""

    def __init__(
        self,
        initial: Initial | None = None,
        top_k: int | None = None,
        newest_first: bool = True,
        fallback_top_k: int | None = 32,
        sinks: int = 0,
    ):
        super().__init__(OwnPosition() if initial is None else initial, newest_first, sinks)
        check_top_k(top_k, fallback_top_k)
        self.top_k, self.fallback_top_k = top_k, fallback_top_k

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        hit = retrieved_entries(block, self.top_k, self.fallback_top_k).any(1)
        position = block.position[:, :, None].double().expand(hit.shape).masked_fill(~hit, -1.0).amax(1)
        value, attended = torch.maximum(summary.value, position), summary.attended | hit.any(1)
        return summary._replace(value=value, attended=attended, last=last_position(summary, block))
