"""Transforms of attention scores into the importance of entries (Attendre section 3.1 and its footnote)."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from trime.common.checks import check_number
from trime.common.types import AttentionBlock, Float, Tensor
from trime.errors import UserError


@runtime_checkable
class ScoreTransform(Protocol):
    """A transform from the attention scores of a block to importance; hidden entries may have any, such as NaN."""

    def __call__(self, block: AttentionBlock) -> Float[Tensor, "b h q m"]:
        """Return the importance of each entry to each query, of any precision; values of hidden entries are ignored."""


def summed_over_heads(transform: ScoreTransform, block: AttentionBlock) -> Float[Tensor, "b q m"]:
    """Return the importance of each entry to each query in float64, summed over heads; that of hidden entries is zero."""
    importance = transform(block)
    if not isinstance(transform, Softmax):
        return importance.masked_fill(~block.visible, 0.0).sum(1, dtype=torch.float64)
    # Weights are zeros where something is hidden, and NaN where all is: a mask for each head would cost more than they do.
    return importance.sum(1, dtype=torch.float64).nan_to_num_(0.0).masked_fill_(block.position[..., None] < 0, 0.0)


class Raw:
    """The score after bias and scale, before the softmax."""

    def __call__(self, block: AttentionBlock) -> Float[Tensor, "b h q m"]:
        return block.score


class Softmax:
    """The attention weight, by a softmax over all entries that the query sees."""

    def __call__(self, block: AttentionBlock) -> Float[Tensor, "b h q m"]:
        return block.score.softmax(-1, dtype=torch.promote_types(block.score.dtype, torch.float32))


class Clipped:
    """The raw score clamped to the range from ``low`` to ``high``; UserError unless ``low`` is smaller."""

    def __init__(self, low: float, high: float):
        for name, limit in (("low", low), ("high", high)):
            check_number(f"eviction.score_transform.{name}", limit)
        if low >= high:
            raise UserError(f"eviction.score_transform: low={low} must lie below high={high}")
        self.low, self.high = low, high

    def __call__(self, block: AttentionBlock) -> Float[Tensor, "b h q m"]:
        return block.score.clamp(self.low, self.high)
