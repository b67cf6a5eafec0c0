"""Where attention to a memory went, for whoever wants it explained."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trime.types import Float, Int, Tensor


class AttentionTrace(NamedTuple):
    """Where the last query of each row looked: its attention, the mean over heads and layers, and the entries' positions.

    Entries that several heads or layers hold come one after another; position -1 is none.
    """

    share: Float[Tensor, "b m"]
    position: Int[Tensor, "b m"]

    def best(self, count: int) -> list[tuple[float, int]]:
        """Share and position of the places to which the first row gave most."""
        there = self.position[0] >= 0
        place, which = self.position[0][there].unique(return_inverse=True)
        total = self.share.new_zeros(len(place)).scatter_add(0, which, self.share[0][there])
        share, order = total.topk(min(count, len(place)))
        return [pair for pair in zip(share.tolist(), place[order].tolist(), strict=True) if pair[0] > 0]


def mean_of(layers: list[AttentionTrace]) -> AttentionTrace | None:
    """Over layers; None where no layer tells."""
    if not layers:
        return None
    return AttentionTrace(
        torch.cat([own.share for own in layers], 1) / len(layers), torch.cat([own.position for own in layers], 1)
    )
