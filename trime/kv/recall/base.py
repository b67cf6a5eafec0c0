"""Keys of blocks of entries, by which queries find the blocks that they attend to."""

from __future__ import annotations

from abc import ABC, abstractmethod

from trime.common.types import Bool, Float, Tensor


def mean_of(key: Float[Tensor, "n s b g d"], filled: Bool[Tensor, "n s b"]) -> Float[Tensor, "n b g d"]:
    """Return the mean of each block's keys, without those that are not ``filled``."""
    weight = filled[..., None, None].to(key.dtype)
    return (key * weight).sum(1) / weight.sum(1).clamp(min=1)


class BlockKey(ABC):
    """Describes blocks by a few vectors for each head of keys, and scores them for queries."""

    @abstractmethod
    def of(self, key: Float[Tensor, "n s b g d"], filled: Bool[Tensor, "n s b"]) -> Float[Tensor, "b r g n d"]:
        """Return what stands for blocks of ``s`` keys each, of which those that are not ``filled`` hold nothing."""

    @abstractmethod
    def scores(self, query: Float[Tensor, "b g q d"], block: Float[Tensor, "b r g n d"]) -> Float[Tensor, "b g q n"]:
        """Return how much queries are expected to attend to a key of each block, as a logit; queries are scaled."""
