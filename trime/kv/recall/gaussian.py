"""A block's keys as a Gaussian: the attention to it is expected to be that to the mean, and more the more its keys differ."""

from __future__ import annotations

import torch

from trime.common.types import Bool, Float, Tensor
from trime.kv.recall.base import BlockKey, mean_of


class Gaussian(BlockKey):
    """The mean m and the variance v of each dimension: log E exp(q k) = q m + q² v / 2."""

    def of(self, key: Float[Tensor, "n s b g d"], filled: Bool[Tensor, "n s b"]) -> Float[Tensor, "b r g n d"]:
        mean = mean_of(key, filled)
        variance = mean_of((key - mean[:, None]).square(), filled)
        return torch.stack([mean, variance]).permute(2, 0, 3, 1, 4)

    def scores(self, query: Float[Tensor, "b g q d"], block: Float[Tensor, "b r g n d"]) -> Float[Tensor, "b g q n"]:
        both = torch.cat([query, query.square() / 2], -1)
        return both @ block.permute(0, 2, 3, 1, 4).flatten(3).mT  # one product of means and variances side by side
