"""Figures of tokens by how often their words occur on dev (TRIME Table 14)."""

from __future__ import annotations

from typing import Any

import numpy as np

from trime.data.corpus import Corpus
from trime.types import Float, Int, Tensor

BUCKETS = {"> 10k": 10_000, "1k-10k": 1_000, "100-1k": 100, "10-100": 10, "≤ 10": -1}  # frequency above which they begin


def frequency(corpus: Corpus) -> np.ndarray:
    """Occurrences of every word on dev."""
    return np.bincount(corpus.split("valid").tokens, minlength=len(corpus.vocabulary))


class ByToken:
    """Sum and count of a figure for every word."""

    def __init__(self, vocabulary: int):
        self.sum, self.count = np.zeros(vocabulary), np.zeros(vocabulary, np.int64)

    def add(self, token: Int[Tensor, " n"], value: Float[Tensor, " n"]) -> None:
        """One figure for each token."""
        np.add.at(self.sum, token.cpu().numpy(), value.double().cpu().numpy())
        np.add.at(self.count, token.cpu().numpy(), 1)

    @property
    def tokens(self) -> int:
        return int(self.count.sum())

    def buckets(self, frequency: np.ndarray) -> list[dict[str, Any]]:
        """Tokens and mean of words by their frequency, and of all; a bucket without tokens has no mean."""
        left, found = np.ones(len(frequency), bool), []
        for name, above in BUCKETS.items():
            inside = left & (frequency > above)
            left &= ~inside
            found.append({"bucket": name, **self.mean(inside)})
        return [*found, {"bucket": "average", **self.mean(np.ones(len(frequency), bool))}]

    def mean(self, inside: np.ndarray) -> dict[str, Any]:
        tokens = int(self.count[inside].sum())
        return {"tokens": tokens, "mean": float(self.sum[inside].sum()) / tokens if tokens else None}
