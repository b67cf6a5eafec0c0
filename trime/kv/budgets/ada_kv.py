"""AdaKV (Feng et al. 2024): heads whose entries score higher keep more of them, of the same room together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trime.common.types import Float, Tensor
from trime.errors import UserError


@dataclass(frozen=True)
class AdaKV:
    """Heads share the room of their layer by the scores of their entries, or of all layers (``across_layers``, as KVzip).

    Each head keeps at least the ``share`` of what all would keep evenly. UserError unless it lies between 0 and 1.
    """

    share: float = 0.2
    across_layers: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError(f"share={self.share}: choose a number between 0 and 1, the part of a head's room that it keeps")

    def __call__(self, scores: list[Float[Tensor, "g n"]], sizes: list[int]) -> list[list[int]]:
        """Return how many entries each head of each layer keeps, where a head of a layer has its size on average."""
        if not self.across_layers:
            return [self.of_heads(each, size * len(each), size) for each, size in zip(scores, sizes, strict=True)]
        heads = len(scores[0])
        counts = self.of_heads(torch.cat(scores), heads * sum(sizes), sum(sizes) // len(sizes))
        return [counts[first : first + heads] for first in range(0, len(counts), heads)]

    def of_heads(self, scores: Float[Tensor, "g n"], kept: int, size: int) -> list[int]:
        """Return how many of the ``kept`` best entries each head has, where its best are safe: a share of ``size``."""
        safe = max(1, int(size * self.share))
        ranked = scores.scatter(1, scores.topk(safe, 1).indices, torch.inf)
        best = ranked.flatten().topk(kept).indices // scores.shape[1]
        return torch.bincount(best, minlength=len(scores)).tolist()
