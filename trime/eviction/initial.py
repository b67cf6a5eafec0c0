"""Scores of entries about to enter a memory (Attendre section 3.1), chosen apart from the policy."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from trime.types import Float, Int, Ranking, Tensor


@runtime_checkable
class Initial(Protocol):
    def __call__(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Scores, float64, from what the memory holds."""
        ...


class OwnPosition:
    """The entry's own position: as if it had been used when it was made."""

    def __call__(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        return position.double()


class Constant:
    """The same for every entry."""

    def __init__(self, value: float = 0.0):
        self.value = value

    def __call__(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        return torch.full(position.shape, self.value, dtype=torch.float64, device=position.device)


class BelowMean:
    """Mean - ``c`` standard deviations of the scores that the row's memory holds, 0 where it is empty."""

    def __init__(self, c: float):
        self.c = c

    def __call__(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        held = ranking.position >= 0
        count = held.sum(1).clamp(min=1)
        score = ranking.score.masked_fill(~held, 0.0)
        mean = score.sum(1) / count
        variance = ((score - mean[:, None]).masked_fill(~held, 0.0) ** 2).sum(1) / count
        return (mean - self.c * variance.sqrt())[:, None].expand(position.shape)
