"""Least recently attended, sum: the score is the sum of what the step's queries gave the entry (Attendre 3.1)."""

from __future__ import annotations

from trime.eviction.base import ByScore, Summary, latest
from trime.types import AttentionBlock


class LRASum(ByScore):
    """Over all queries and heads; each step overwrites the last one."""

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        score = self.reading(block).masked_fill(~block.seen, 0.0).sum((1, 2))
        return Summary(summary.value + score, summary.seen | block.seen.any(2).any(1), latest(summary, block))
