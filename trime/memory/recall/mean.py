"""The mean of a block's keys, as MoBA (Lu et al. 2025) finds blocks."""

from __future__ import annotations

from trime.common.types import Bool, Float, Tensor
from trime.memory.recall.base import BlockKey, mean_of


class MeanKey(BlockKey):
    """One vector for each head: the mean of the block's keys."""

    def of(self, key: Float[Tensor, "n s b g d"], filled: Bool[Tensor, "n s b"]) -> Float[Tensor, "b r g n d"]:
        return mean_of(key, filled).permute(1, 2, 0, 3)[:, None]

    def scores(self, query: Float[Tensor, "b g q d"], block: Float[Tensor, "b r g n d"]) -> Float[Tensor, "b g q n"]:
        return query @ block[:, 0].transpose(-1, -2)
