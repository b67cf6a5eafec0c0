"""Least recently attended, sum: the sum of the scores that the step's queries gave to the entry (Attendre 3.1)."""

from __future__ import annotations

import torch

from trime.common.types import AttentionBlock
from trime.kv.eviction.base import AttentionScorePolicy, Summary, last_position, sum_seen


class LRASum(AttentionScorePolicy):
    """Score entries by the sum over the queries and heads of a step; each step overwrites the one before."""

    scored_by = "last_step"

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        score, seen = sum_seen(block, self.score_transform(block), torch.ones_like(block.position, dtype=torch.float64))
        value, attended = summary.value + score, summary.attended | seen
        return summary._replace(value=value, attended=attended, last=last_position(summary, block))
