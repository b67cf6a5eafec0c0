"""The oracle of a replay: keeps what queries still to come will attend to most. It needs the future, so no run can have it."""

from __future__ import annotations

import torch

from trime.eviction.base import EvictionPolicy, Summary
from trime.eviction.initial import Constant
from trime.types import Float, Int, Ranking, Tensor


class Clairvoyant(EvictionPolicy):
    """``mass``: what the queries of each step give every entry of a document; ``starts``: position of its first query."""

    def __init__(self, mass: Float[Tensor, "s n"], starts: Int[Tensor, " s"]):
        super().__init__(Constant())
        later = mass.double().flip(0).cumsum(0).flip(0)
        self.later, self.starts = torch.cat([later, torch.zeros_like(later[:1])]), starts

    def future(self, position: Int[Tensor, "b n"], last: Int[Tensor, " b"]) -> Float[Tensor, "b n"]:
        """What entries receive after the step of the query at ``last``."""
        step = torch.searchsorted(self.starts, last.cpu(), right=True)
        return self.later[step[:, None], position.cpu().clamp(min=0)].to(position.device)

    def admit(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        return self.future(position, position.amax(1))

    def update_scores(self, ranking: Ranking, summary: Summary) -> Float[Tensor, "b m"]:
        return self.future(ranking.position, summary.last)
