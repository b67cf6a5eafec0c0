"""A block's mean key, as in Landmark-free block attention such as MoBA (Lu et al. 2025)."""

from __future__ import annotations

from trime.common.types import Bool, Float, Tensor
from trime.memory.recall.base import BlockKey


class MeanKey(BlockKey):
    """The mean of a block's keys."""

    def of(self, key: Float[Tensor, "n s b g d"], filled: Bool[Tensor, "n s b"]) -> Float[Tensor, "b r g n d"]:
        weight = filled[..., None, None].to(key.dtype)
        mean = (key * weight).sum(1) / weight.sum(1).clamp(min=1)
        return mean.permute(1, 2, 0, 3)[:, None]

    def scores(self, query: Float[Tensor, "b g q d"], block: Float[Tensor, "b r g n d"]) -> Float[Tensor, "b g q n"]:
        return query @ block[:, 0].transpose(-1, -2)
