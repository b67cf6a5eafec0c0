"""The oracle of a replay: it keeps the entries that later queries attend to most, which only a replay can know."""

from __future__ import annotations

import torch

from trime.common.types import Float, Int, Ranking, Tensor
from trime.memory.slots.eviction.base import EvictionPolicy, Summary
from trime.memory.slots.eviction.initial import Constant


class Clairvoyant(EvictionPolicy):
    """A policy whose scores are the attention that entries will still receive.

    ``mass``: the attention that each step gives to every entry of a document; ``starts``: the position of its first query.
    """

    def __init__(self, mass: Float[Tensor, "s n"], starts: Int[Tensor, " s"]):
        super().__init__(Constant())
        # later[s] is the mass from step s on: a sum over the steps from the last back to it.
        later = mass.double().flip(0).cumsum(0).flip(0)
        self.later, self.starts = torch.cat([later, torch.zeros_like(later[:1])]), starts

    def future_mass(self, position: Int[Tensor, "b n"], last: Int[Tensor, " b"]) -> Float[Tensor, "b n"]:
        """Return the attention that entries receive after the step of the query at ``last``."""
        step = torch.searchsorted(self.starts, last.cpu(), right=True)
        return self.later[step[:, None], position.cpu().clamp(min=0)].to(position.device)

    def admit(self, ranking: Ranking, position: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        return self.future_mass(position, position.amax(1))

    def update_scores(self, ranking: Ranking, summary: Summary) -> Float[Tensor, "b m"]:
        return self.future_mass(ranking.position, summary.last)
