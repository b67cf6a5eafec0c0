"""Means of per-token values, bucketed by the word's frequency on dev (TRIME Table 14)."""

from __future__ import annotations

from typing import Any

import numpy as np

from trime.common.types import Float, Int, Tensor
from trime.data.corpus import Corpus

BUCKETS = {"> 10k": 10_000, "1k-10k": 1_000, "100-1k": 100, "10-100": 10, "≤ 10": -1}  # lower bounds, exclusive


def dev_frequency(corpus: Corpus) -> np.ndarray:
    """Return the number of occurrences of every word on dev."""
    return np.bincount(corpus.split("valid").tokens, minlength=len(corpus.vocabulary))


class TokenMeans:
    """Accumulates the sum and the count of a per-token value for every word; ``vocabulary`` is the number of words."""

    def __init__(self, vocabulary: int):
        self.sum, self.count = np.zeros(vocabulary), np.zeros(vocabulary, np.int64)

    def add(self, token: Int[Tensor, " n"], value: Float[Tensor, " n"]) -> None:
        np.add.at(self.sum, token.cpu().numpy(), value.double().cpu().numpy())
        np.add.at(self.count, token.cpu().numpy(), 1)

    @property
    def tokens(self) -> int:
        return int(self.count.sum())

    def buckets(self, frequency: np.ndarray) -> list[dict[str, Any]]:
        """Return token count and mean by frequency bucket, then over all words; the mean of an empty bucket is None."""
        remaining, rows = np.ones(len(frequency), bool), []
        for name, bound in BUCKETS.items():
            inside = remaining & (frequency > bound)
            remaining &= ~inside
            rows.append({"bucket": name, **self.mean(inside)})
        return [*rows, {"bucket": "average", **self.mean(np.ones(len(frequency), bool))}]

    def mean(self, inside: np.ndarray) -> dict[str, Any]:
        """Return token count and mean over the words of a mask."""
        tokens = int(self.count[inside].sum())
        return {"tokens": tokens, "mean": float(self.sum[inside].sum()) / tokens if tokens else None}
