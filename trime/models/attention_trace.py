"""Where attention to a memory went, for explanations of what a model generates."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trime.types import Float, Int, Tensor


class AttentionTrace(NamedTuple):
    """The attention of each row's last query to a memory, averaged over heads and layers, with the entries' positions.

    Entries of several heads or layers stand one after another; position -1 marks an empty slot.
    """

    share: Float[Tensor, "b m"]
    position: Int[Tensor, "b m"]

    def top(self, count: int) -> list[tuple[float, int]]:
        """Return (share, position) of the ``count`` positions with the largest shares in the first row."""
        filled = self.position[0] >= 0
        position, index = self.position[0][filled].unique(return_inverse=True)
        total = self.share.new_zeros(len(position)).scatter_add(0, index, self.share[0][filled])
        share, order = total.topk(min(count, len(position)))
        return [pair for pair in zip(share.tolist(), position[order].tolist(), strict=True) if pair[0] > 0]


def mean_trace(layers: list[AttentionTrace]) -> AttentionTrace | None:
    """Return the mean over layers, or None where no layer has recorded its attention."""
    if not layers:
        return None
    return AttentionTrace(
        torch.cat([trace.share for trace in layers], 1) / len(layers), torch.cat([trace.position for trace in layers], 1)
    )
