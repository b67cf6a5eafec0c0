"""Least recently attended, max: the score is the largest that a query of the step gave the entry (Attendre 3.1)."""

from __future__ import annotations

import torch

from trime.eviction.base import ByScore, Summary, latest
from trime.types import AttentionBlock, Ranking


class LRAMax(ByScore):
    """Over all queries and heads; each step overwrites the last one."""

    def begin(self, ranking: Ranking) -> Summary:
        empty = super().begin(ranking)
        return empty._replace(value=torch.full_like(empty.value, -torch.inf))

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        score = self.reading(block).masked_fill(~block.seen, -torch.inf).amax((1, 2))
        return Summary(torch.maximum(summary.value, score), summary.seen | block.seen.any(2).any(1), latest(summary, block))
