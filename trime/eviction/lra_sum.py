"""Least recently attended, sum: the sum of the scores that the step's queries gave to the entry (Attendre 3.1)."""

from __future__ import annotations

from trime.eviction.base import AttentionScorePolicy, Summary, last_position
from trime.types import AttentionBlock


class LRASum(AttentionScorePolicy):
    """Score entries by the sum over the queries and heads of a step; each step overwrites the one before."""

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        score = self.score_transform(block).masked_fill(~block.visible, 0.0).sum((1, 2))
        return Summary(summary.value + score, summary.attended | block.visible.any(2).any(1), last_position(summary, block))
