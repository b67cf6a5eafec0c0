"""How attention scores are read as importance (Attendre section 3.1 and its footnote): raw, softmax, clipped."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from trime.types import AttentionBlock, Float, Tensor


@runtime_checkable
class Reading(Protocol):
    def __call__(self, block: AttentionBlock) -> Float[Tensor, "b h q m"]:
        """Importance, float64; what it says of an entry that a query does not see is not used."""
        ...


class Raw:
    """The score after bias and scale, before the softmax."""

    def __call__(self, block: AttentionBlock) -> Float[Tensor, "b h q m"]:
        return block.score.double()


class Softmax:
    """The attention weight over all entries that the query sees."""

    def __call__(self, block: AttentionBlock) -> Float[Tensor, "b h q m"]:
        return block.score.double().softmax(-1)


class Clipped:
    """The raw score, held within ``low`` and ``high``."""

    def __init__(self, low: float, high: float):
        if low >= high:
            raise ValueError(f"eviction.reading: low={low} must lie below high={high}")
        self.low, self.high = low, high

    def __call__(self, block: AttentionBlock) -> Float[Tensor, "b h q m"]:
        return block.score.double().clamp(self.low, self.high)
