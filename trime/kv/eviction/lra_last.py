"""Least recently attended, last query: the score that the step's last query gave to the entry (Attendre 3.1)."""

from __future__ import annotations

import torch

from trime.common.checks import check_choice
from trime.common.types import AttentionBlock
from trime.kv.eviction.base import AttentionScorePolicy, Summary, last_position
from trime.kv.eviction.initial import Initial
from trime.kv.eviction.score_transform import ScoreTransform


class LRALast(AttentionScorePolicy):
    """Score entries by the last query of each step; ``heads``: the sum or the max over heads (else UserError)."""

    scored_by = "last_step"
    observes = 1

    def __init__(
        self,
        initial: Initial | None = None,
        score_transform: ScoreTransform | None = None,
        heads: str = "sum",
        newest_first: bool = True,
        sinks: int = 0,
    ):
        super().__init__(initial, score_transform, newest_first, sinks)
        check_choice("eviction.heads", heads, ("sum", "max"))
        self.heads = heads

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        last, query = block.position.max(1)
        # Rows may end at different columns: the last query of each is taken before its scores are transformed.
        block = block.take(query[:, None]) if block.position.shape[1] > 1 else block
        score, visible = self.score_transform(block).squeeze(2), block.visible.squeeze(2)
        if self.heads == "sum":
            pooled = score.masked_fill(~visible, 0.0).sum(1, dtype=torch.float64)
        else:
            pooled = score.masked_fill(~visible, -torch.inf).amax(1).double()
        later = (last > summary.last)[:, None]
        value, hit = torch.where(later, pooled, summary.value), torch.where(later, visible.any(1), summary.attended)
        return summary._replace(value=value, attended=hit, last=last_position(summary, block))
