"""Least frequently attended: scores are summed over all queries, and older ones decay (Attendre section 3.1)."""

from __future__ import annotations

import torch

from trime.common.checks import check_number
from trime.common.types import AttentionBlock, Float, Int, Ranking, Tensor
from trime.kv.eviction.base import AttentionScorePolicy, Summary, last_position, sum_seen
from trime.kv.eviction.initial import Initial
from trime.kv.eviction.score_transform import ScoreTransform


class LFA(AttentionScorePolicy):
    """Sum exp(-``gamma`` (p - q)) score over queries and heads, at positions q up to the last one, p.

    ``replaces``: the first attention replaces the initial score instead of adding to it. UserError if gamma < 0.
    """

    def __init__(
        self,
        initial: Initial | None = None,
        score_transform: ScoreTransform | None = None,
        gamma: float = 0.0,
        replaces: bool = False,
        newest_first: bool = True,
        sinks: int = 0,
    ):
        super().__init__(initial, score_transform, newest_first, sinks)
        check_number("eviction.gamma", gamma, at_least=0)  # older queries must not weigh more than newer ones
        self.gamma, self.replaces = gamma, replaces
        self.can_be_guided = gamma == 0  # scores that decay belong to a position, and a question has none in the text
        self.scored_by = "queries" if replaces else "steps"  # a first score may depend on those of the steps before

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        last = last_position(summary, block)
        score, seen = sum_seen(block, self.score_transform(block), self.decay(last[:, None] - block.position))
        value = self.decay(last - summary.last)[:, None] * summary.value + score
        return summary._replace(value=value, attended=summary.attended | seen, last=last)

    def update_scores(self, ranking: Ranking, summary: Summary) -> Float[Tensor, "b m"]:
        # Scores decay to the last query's position; before the first query nothing has decayed.
        passed = torch.where(ranking.clock >= 0, summary.last - ranking.clock, 0)
        old = self.decay(passed)[:, None] * ranking.score
        if self.replaces:
            old = old.masked_fill(summary.attended & ~ranking.attended, 0.0)
        return old + summary.value

    def decay(self, distance: Int[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return the factor by which scores shrink over a distance in tokens."""
        return torch.exp(-self.gamma * distance.double())
