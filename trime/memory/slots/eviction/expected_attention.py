"""Expected attention (Devoto et al. 2025): entries stay to which queries like those of now would attend later."""

from __future__ import annotations

import torch

from trime.common.checks import check_number
from trime.common.types import AttentionBlock, Float, Ranking, Tensor
from trime.errors import UserError
from trime.memory.slots.eviction.base import EvictionPolicy, Summary
from trime.memory.slots.eviction.initial import OwnPosition


class ExpectedAttention(EvictionPolicy):
    """Score entries by the attention that they can expect at the next ``ahead`` positions, times the norm of their values.

    Queries are taken as normally distributed, with the mean and the covariance of a step's queries, each turned by its mean
    rotation over these positions: the expectation of exp(x) is then exp(mean + variance / 2) of its logits x. A step of fewer
    queries than ``least``, such as a token that is written, leaves the scores as they are: its own entries stay until the next
    such step. The first ``sinks`` queries do not count, as they differ from all others. For decoders with an EvictingCache.
    """

    needs_keys = needs_entries = True

    def __init__(self, ahead: int = 512, least: int = 8, newest_first: bool = True, sinks: int = 4):
        super().__init__(OwnPosition(), newest_first, sinks)
        for name, number in (("ahead", ahead), ("least", least)):
            check_number(f"eviction.{name}", number, at_least=1, whole=True)
        self.ahead, self.least = ahead, least

    def check_chunk(self, chunk: int) -> None:
        if chunk < self.least:
            raise UserError(
                f"chunk={chunk}: ExpectedAttention needs steps of at least {self.least} queries: raise the size or chunk"
            )

    def accumulate(self, summary: Summary, block: AttentionBlock) -> Summary:
        """Return the summary with the logarithm of each head's expected attention, and the norm of its values, [b 2 h m]."""
        if block.seen is None:
            raise UserError("ExpectedAttention is for the EvictingCache of a decoder: choose another policy")
        counts = block.position >= self.sinks
        queries = counts.sum(1)
        logits = block.seen.ahead(self.ahead).double().masked_fill(~counts[:, None, :, None], 0.0)
        mean, square = (each.sum(2) / queries.clamp(min=1)[:, None, None] for each in (logits, logits**2))
        norm = block.seen.value.double().norm(dim=-1).transpose(1, 2)
        norm = norm.repeat_interleave(mean.shape[1] // norm.shape[1], 1)
        attended = block.visible.any(2).any(1) & (queries >= self.least)[:, None]
        value = torch.stack([mean + (square - mean**2) / 2, norm], 1)
        return super().accumulate(summary, block)._replace(value=value, attended=attended)

    def update_scores(self, ranking: Ranking, summary: Summary) -> Float[Tensor, "b m"]:
        """Return the sum over heads of expected attention to the entries that are no sinks, times the norms of values."""
        if summary.value.dim() == 2:
            return ranking.score
        expected, norm = summary.value.unbind(1)
        shares = (summary.attended & (ranking.score < torch.inf))[:, None]
        weight = expected.masked_fill(~shares, -torch.inf).softmax(-1).nan_to_num()
        return torch.where(summary.attended, (weight * norm).sum(1), ranking.score)
