"""Budgets: the shares of layers and heads in the room of a model's memories."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trime.common.checks import check_number
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
        """Return the number of entries that each head of each layer keeps, where a head of a layer has its size on average."""
        if not self.across_layers:
            return [self.of_heads(each, size * len(each), size) for each, size in zip(scores, sizes, strict=True)]
        heads = len(scores[0])
        counts = self.of_heads(torch.cat(scores), heads * sum(sizes), sum(sizes) // len(sizes))
        return [counts[first : first + heads] for first in range(0, len(counts), heads)]

    def of_heads(self, scores: Float[Tensor, "g n"], kept: int, size: int) -> list[int]:
        """Return the number of each head's entries among the ``kept`` best, where its best are safe: a share of ``size``."""
        safe = max(1, int(size * self.share))
        ranked = scores.scatter(1, scores.topk(safe, 1).indices, torch.inf)
        best = ranked.flatten().topk(kept).indices // scores.shape[1]
        return torch.bincount(best, minlength=len(scores)).tolist()


def pyramid(size: float, layers: int, beta: float = 20.0, longest: int | None = None) -> list[int]:
    """Return the sizes of layers, ``size`` on average, which fall evenly from the first to the last.

    The last has ``size / beta``, and the first so much more than ``size``. ``longest``: no layer needs more, as for a text of
    that length; the last ones have more then. UserError unless there are layers, ``beta`` is at least 1, and each layer has an
    entry.
    """
    check_number("size", size, above=0)
    check_number("layers", layers, at_least=1, whole=True)
    check_number("beta", beta, at_least=1)
    if layers == 1 or (longest is not None and longest <= size):
        return [round(size if longest is None else min(size, longest))] * layers
    least = size / beta
    most = 2 * size - least
    if longest is not None and most >= longest:
        most = longest
        least = 2 * size - most
    step = (most - least) / (layers - 1)
    sizes = [round(most - layer * step) for layer in range(layers)]
    if min(sizes) < 1:
        raise UserError(f"a pyramid of {size} entries with beta={beta} leaves a layer without any: lower beta")
    return sizes
