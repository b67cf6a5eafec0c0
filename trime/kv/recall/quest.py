"""Bounds of a block's keys (Quest, Tang et al. 2024): the largest product that a query can have with a key between them."""

from __future__ import annotations

import torch

from trime.common.types import Bool, Float, Tensor
from trime.kv.recall.base import BlockKey


class Quest(BlockKey):
    """The least and the greatest value of each dimension; a query takes the greater product in each."""

    def of(self, key: Float[Tensor, "n s b g d"], filled: Bool[Tensor, "n s b"]) -> Float[Tensor, "b r g n d"]:
        empty = ~filled[..., None, None]
        least, greatest = key.masked_fill(empty, torch.inf).amin(1), key.masked_fill(empty, -torch.inf).amax(1)
        return torch.stack([least, greatest]).permute(2, 0, 3, 1, 4).nan_to_num(0, 0, 0)

    def scores(self, query: Float[Tensor, "b g q d"], block: Float[Tensor, "b r g n d"]) -> Float[Tensor, "b g q n"]:
        least, greatest = (bound.transpose(-1, -2) for bound in block.unbind(1))
        return query.clamp(min=0) @ greatest + query.clamp(max=0) @ least
