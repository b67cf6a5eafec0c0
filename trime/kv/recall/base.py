"""Keys of blocks of entries, by which queries find the blocks that they attend to."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from trime.common.types import Bool, Float, Tensor


def mean_of(key: Float[Tensor, "n s b g d"], filled: Bool[Tensor, "n s b"]) -> Float[Tensor, "n b g d"]:
    """Return the mean of each block's keys, without those that are not ``filled``."""
    weight = filled[..., None, None].to(key.dtype)
    return (key * weight).sum(1) / weight.sum(1).clamp(min=1)


class BlockKey(ABC):
    """Describes blocks by a few vectors for each head of keys, and scores them for queries."""

    @abstractmethod
    def of(self, key: Float[Tensor, "n s b g d"], filled: Bool[Tensor, "n s b"]) -> Float[Tensor, "b r g n d"]:
        """Return the keys of blocks of ``s`` entries each; places that are not ``filled`` hold nothing."""

    @abstractmethod
    def scores(self, query: Float[Tensor, "b g q d"], block: Float[Tensor, "b r g n d"]) -> Float[Tensor, "b g q n"]:
        """Return the expected logit of queries for a key of each block; queries are scaled."""


class Gaussian(BlockKey):
    """The mean m and the variance v of each dimension: log E exp(q k) = q m + q² v / 2."""

    def of(self, key: Float[Tensor, "n s b g d"], filled: Bool[Tensor, "n s b"]) -> Float[Tensor, "b r g n d"]:
        mean = mean_of(key, filled)
        variance = mean_of((key - mean[:, None]).square(), filled)
        return torch.stack([mean, variance]).permute(2, 0, 3, 1, 4)

    def scores(self, query: Float[Tensor, "b g q d"], block: Float[Tensor, "b r g n d"]) -> Float[Tensor, "b g q n"]:
        both = torch.cat([query, query.square() / 2], -1)
        return both @ block.permute(0, 2, 3, 1, 4).flatten(3).mT  # one product of means and variances side by side


class Quest(BlockKey):
    """The least and the greatest value of each dimension; a query takes the greater product in each."""

    def of(self, key: Float[Tensor, "n s b g d"], filled: Bool[Tensor, "n s b"]) -> Float[Tensor, "b r g n d"]:
        empty = ~filled[..., None, None]
        least, greatest = key.masked_fill(empty, torch.inf).amin(1), key.masked_fill(empty, -torch.inf).amax(1)
        return torch.stack([least, greatest]).permute(2, 0, 3, 1, 4).nan_to_num(0, 0, 0)

    def scores(self, query: Float[Tensor, "b g q d"], block: Float[Tensor, "b r g n d"]) -> Float[Tensor, "b g q n"]:
        least, greatest = (bound.transpose(-1, -2) for bound in block.unbind(1))
        return query.clamp(min=0) @ greatest + query.clamp(max=0) @ least
