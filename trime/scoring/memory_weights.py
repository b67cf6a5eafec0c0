"""The mean weight of each memory in a fitted mixture: by frequency of the token, and by how well the memory matches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trime.common.types import Float, Int, Tensor
from trime.scoring.loss_sums import TokenMeans
from trime.scoring.mixtures.experts import ExpertMasses


def select_memories(
    masses: ExpertMasses, description: dict[str, Any], names: tuple[str, ...]
) -> tuple[ExpertMasses, dict[str, Any]]:
    """Return the masses of the vocabulary and of some memories, and its description."""
    columns, first = [0], 1
    for name, size in description["experts"].items():
        columns += range(first, first + size) if name in names else []
        first += size
    experts = {name: size for name, size in description["experts"].items() if name in names}
    selected = ExpertMasses(masses.target[:, columns].contiguous(), masses.total[:, columns].contiguous(), masses.document)
    return selected, {"experts": experts, "counts": [description["counts"][column] for column in columns]}


@dataclass(frozen=True)
class Bins:
    """Bins of tokens by how well a memory matches: the ``similarity`` of its best entry, or the longest ``context`` of n-grams.

    ``columns``: its experts in the masses; ``edges`` [b - 1]: ascending similarities; ``names`` [b].
    """

    kind: str
    columns: slice
    names: list[str]
    edges: Float[Tensor, " b"]

    def of(self, total: Float[Tensor, "n e"]) -> Int[Tensor, " n"]:
        """Return the bin of each token, -1 where the memory has no match."""
        masses = total[:, self.columns]
        known = masses.isfinite()
        if self.kind == "context":
            return known.sum(1) - 1
        return torch.where(known[:, 0], torch.bucketize(masses[:, 0].contiguous(), self.edges.to(masses)), -1)


def token_weights(
    bins: dict[str, Bins], total: Float[Tensor, "n e"], log_weights: Float[Tensor, "n e"]
) -> tuple[Float[Tensor, "n s"], Int[Tensor, "n m"]]:
    """Return of each token the weights of the vocabulary and of each memory, and its bin for each memory.

    ``total`` and ``log_weights`` are the log-mass and the log-weight of each expert.
    """
    weight = log_weights.exp()
    share = torch.stack([weight[:, 0], *(weight[:, each.columns].sum(1) for each in bins.values())], 1)
    return share, torch.stack([each.of(total) for each in bins.values()], 1)


class WeightSums:
    """Sums the weights over the tokens of a text."""

    def __init__(self, bins: dict[str, Bins], vocabulary: int):
        self.bins = bins
        self.largest = torch.zeros(1 + len(bins), dtype=torch.long)
        self.by_token = [TokenMeans(vocabulary) for _ in self.largest]
        self.by_bin = {name: TokenMeans(len(memory_bins.names)) for name, memory_bins in bins.items()}

    def add(self, token: Int[Tensor, " n"], share: Float[Tensor, "n s"], number: Int[Tensor, "n m"]) -> None:
        """Add tokens with the result of ``token_weights``."""
        self.largest += share.argmax(1).bincount(minlength=share.shape[1])
        for table, column in zip(self.by_token, share.unbind(1), strict=True):
            table.add(token, column)
        for table, column, bins in zip(self.by_bin.values(), share[:, 1:].unbind(1), number.unbind(1), strict=True):
            # -1: the memory knew nothing of the token.
            known = bins >= 0
            table.add(bins[known], column[known])

    def summary(self, frequency: np.ndarray) -> dict[str, Any]:
        """Return, for the vocabulary and each memory, the share of tokens where its weight is largest, and mean weights."""
        result: dict[str, Any] = {}
        for name, largest, table in zip(["vocabulary", *self.bins], self.largest.tolist(), self.by_token, strict=True):
            result[name] = {"largest": largest / max(1, table.tokens), "by_frequency": table.buckets(frequency)}
        for name, bins in self.bins.items():
            masks = np.eye(len(bins.names), dtype=bool)
            cells = [{"bucket": bucket, **self.by_bin[name].mean(mask)} for bucket, mask in zip(bins.names, masks, strict=True)]
            result[name] |= {f"by_{bins.kind}": cells}
        return result
