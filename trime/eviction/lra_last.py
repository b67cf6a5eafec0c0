"""Least recently attended, last query: the score is what the step's last query thought of the entry (Attendre 3.1)."""

from __future__ import annotations

import torch

from trime.eviction.base import ByScore, Summary, latest
from trime.eviction.initial import Initial
from trime.eviction.reading import Reading
from trime.types import AttentionBlock


class LRALast(ByScore):
    """``heads``: the score is their sum or their max."""

    def __init__(self, initial: Initial, reading: Reading, heads: str = "sum", newest_first: bool = True):
        super().__init__(initial, reading, newest_first)
        if heads not in ("sum", "max"):
            raise ValueError(f"eviction.heads={heads}: choose sum or max")
        self.heads = heads

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        last, query = block.position.max(1)
        index = query[:, None, None, None].expand(-1, block.score.shape[1], 1, block.score.shape[3])
        score, seen = self.reading(block).gather(2, index).squeeze(2), block.seen.gather(2, index).squeeze(2)
        pooled = score.masked_fill(~seen, 0.0).sum(1) if self.heads == "sum" else score.masked_fill(~seen, -torch.inf).amax(1)
        later = (last > summary.last)[:, None]
        value, hit = torch.where(later, pooled, summary.value), torch.where(later, seen.any(1), summary.seen)
        return Summary(value, hit, latest(summary, block))
