"""Least recently attended, max: the largest score that a query of the step gave to the entry (Attendre 3.1)."""

from __future__ import annotations

import torch

from trime.common.types import AttentionBlock, Ranking
from trime.kv.eviction.base import AttentionScorePolicy, Summary, last_position


class LRAMax(AttentionScorePolicy):
    """Score entries by the maximum over the queries and heads of a step; each step overwrites the one before."""

    scored_by = "last_step"

    def begin(self, ranking: Ranking) -> Summary:
        empty = super().begin(ranking)
        return empty._replace(value=torch.full_like(empty.value, -torch.inf))

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        score = self.score_transform(block).masked_fill(~block.visible, -torch.inf).amax((1, 2)).double()
        value, attended = torch.maximum(summary.value, score), summary.attended | block.visible.any(2).any(1)
        return summary._replace(value=value, attended=attended, last=last_position(summary, block))
