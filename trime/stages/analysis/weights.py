"""What weight a fitted mixture gives to the vocabulary and to each memory: in all, by frequency, by what the memory knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trime.evaluation.frequency import TokenMeans
from trime.memory.base import Memory
from trime.mixtures.experts import Evidence
from trime.types import Float, Int, Tensor

BINS = 10  # of tokens, by the similarity of the best entry


@dataclass(frozen=True)
class Bins:
    """Tokens by what a memory knows of their contexts: ``similarity`` of its best entry, or the longest ``context`` of n-grams.

    ``columns``: where its experts are in the evidence; ``edges`` [b - 1]: of similarities, rising; ``names`` [b].
    """

    kind: str
    columns: slice
    names: list[str]
    edges: Float[Tensor, " b"]

    def of(self, total: Float[Tensor, "n e"]) -> Int[Tensor, " n"]:
        """Return the bin of each token, -1 where the memory knows nothing."""
        own = total[:, self.columns]
        known = own.isfinite()
        if self.kind == "context":
            return known.sum(1) - 1
        return torch.where(known[:, 0], torch.bucketize(own[:, 0].contiguous(), self.edges.to(own)), -1)


def bins_of(evidence: Evidence, experts: dict[str, int], memories: dict[str, Memory]) -> dict[str, Bins]:
    """Return the bins of each memory. Those of similarities hold as many of these tokens each.

    The similarity of the best entry is what the log-mass of the sharpest softmax follows.
    """
    found, first = {}, 1
    for name, size in experts.items():
        columns, first = slice(first, first + size), first + size
        if names := memories[name].expert_names:
            found[name] = Bins("context", columns, names, torch.zeros(0))
            continue
        best = evidence.total[:, columns.start]
        known = best[best.isfinite()].numpy()
        edges = np.quantile(known, np.arange(1, BINS) / BINS) if len(known) else np.zeros(BINS - 1)
        names = [f"{100 * number // BINS}–{100 * (number + 1) // BINS} %" for number in range(BINS)]
        found[name] = Bins("similarity", columns, names, torch.as_tensor(edges))
    return found


class Weights:
    """Sums over the tokens of a text, window by window."""

    def __init__(self, bins: dict[str, Bins], vocabulary: int):
        self.bins = bins
        self.largest = torch.zeros(1 + len(bins), dtype=torch.long)
        self.by_token = [TokenMeans(vocabulary) for _ in self.largest]
        self.by_bin = {name: TokenMeans(len(own.names)) for name, own in bins.items()}

    def add(self, token: Int[Tensor, " n"], total: Float[Tensor, "n e"], log_weights: Float[Tensor, "n e"]) -> None:
        """Add a window's tokens, with each expert's log-mass and log-weight."""
        weight = log_weights.exp()
        share = torch.stack([weight[:, 0], *(weight[:, own.columns].sum(1) for own in self.bins.values())])
        self.largest += share.argmax(0).bincount(minlength=len(share)).cpu()
        for table, part in zip(self.by_token, share, strict=True):
            table.add(token, part)
        for (name, own), part in zip(self.bins.items(), share[1:], strict=True):
            place = own.of(total)
            known = place >= 0
            self.by_bin[name].add(place[known], part[known])

    def summary(self, frequency: np.ndarray) -> dict[str, Any]:
        """Return, for the vocabulary and each memory, on what share of tokens its weight is the largest, and mean weights."""
        result: dict[str, Any] = {}
        for name, largest, table in zip(["vocabulary", *self.bins], self.largest.tolist(), self.by_token, strict=True):
            result[name] = {"largest": largest / max(1, table.tokens), "by_frequency": table.buckets(frequency)}
        for name, own in self.bins.items():
            every = np.eye(len(own.names), dtype=bool)
            cells = [{"bucket": one, **self.by_bin[name].mean(inside)} for one, inside in zip(own.names, every, strict=True)]
            result[name] |= {f"by_{own.kind}": cells}
        return result
