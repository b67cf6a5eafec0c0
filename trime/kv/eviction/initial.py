"""Initial scores of new entries (Attendre section 3.1), chosen independently of the policy."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from trime.common.checks import check_number
from trime.common.types import Float, Int, Ranking, Tensor


@runtime_checkable
class Initial(Protocol):
    """A rule for the initial scores of new entries."""

    def __call__(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Return initial scores in float64, given the ranking of the entries in memory."""


class OwnPosition:
    """The entry's own position, as if the entry had been used when it was written."""

    def __call__(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        return position.double()


class Constant:
    """The same score for every entry."""

    def __init__(self, value: float = 0.0):
        check_number("eviction.initial.value", value)
        self.value = value

    def __call__(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        return torch.full(position.shape, self.value, dtype=torch.float64, device=position.device)


class BelowMean:
    """The mean of the scores in the row's memory, sinks excepted, minus ``c`` standard deviations; 0 where there are none."""

    def __init__(self, c: float = 0.0):
        check_number("eviction.initial.c", c)
        self.c = c

    def __call__(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        scored = ranking.score.isfinite()
        count = scored.sum(1).clamp(min=1)
        score = ranking.score.masked_fill(~scored, 0.0)
        mean = score.sum(1) / count
        variance = ((score - mean[:, None]).masked_fill(~scored, 0.0) ** 2).sum(1) / count
        return (mean - self.c * variance.sqrt())[:, None].expand(position.shape)
