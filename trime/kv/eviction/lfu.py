"""Least frequently used: the score counts how often an entry was retrieved."""

from __future__ import annotations

import torch

from trime.common.checks import check_choice
from trime.common.types import AttentionBlock, Float, Ranking, Tensor
from trime.kv.eviction.base import EvictionPolicy, Summary, check_top_k, last_position, retrieved_entries
from trime.kv.eviction.initial import Constant, Initial

UNITS = ("step", "query", "query_head")


class LFU(EvictionPolicy):
    """Count the retrievals of each entry; ``count`` names the unit: steps, queries, or queries of each head.

    ``top_k`` and ``fallback_top_k`` decide what counts as retrieved (see ``retrieved_entries``). UserError for another unit.
    """

    can_be_guided = True

    def __init__(
        self,
        initial: Initial | None = None,
        top_k: int | None = None,
        count: str = "query",
        newest_first: bool = True,
        fallback_top_k: int | None = 32,
        sinks: int = 0,
    ):
        super().__init__(Constant() if initial is None else initial, newest_first, sinks)
        check_choice("eviction.count", count, UNITS)
        check_top_k(top_k, fallback_top_k)
        self.top_k, self.count, self.fallback_top_k = top_k, count, fallback_top_k

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        hit = retrieved_entries(block, self.top_k, self.fallback_top_k)
        times = hit.sum((1, 2)) if self.count == "query_head" else hit.any(1).sum(1)
        value, attended = summary.value + times, summary.attended | (times > 0)
        return summary._replace(value=value, attended=attended, last=last_position(summary, block))

    def update_scores(self, ranking: Ranking, summary: Summary) -> Float[Tensor, "b m"]:
        times = summary.attended.double() if self.count == "step" else summary.value
        return torch.where(summary.attended, ranking.score + times, ranking.score)
