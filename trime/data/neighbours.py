"""SimSeg(I, c, k) of TRIME's Algorithm 1: each segment's most similar segments by BM25.

Backends answer the same question: ``Fast`` is bm25s with numba and Lucene's variant, ``Reference`` is
rank_bm25's Okapi, which ranks words of more than half the segments above rarer ones (facts, section 4)
and costs a second per segment at 30,000 of them. Terms are token ids.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Backend(Protocol):
    def fit(self, segments: list[np.ndarray]) -> None:
        """Indexes the segments."""

    def nearest(self, queries: list[int], k: int) -> np.ndarray:
        """[queries k] of segment numbers, most similar first, without the query itself; -1 where fewer."""


class Fast:
    """bm25s, Lucene's variant (k1 = 0.9, b = 0.4), compiled by numba, on all cores (threads=-1) or some."""

    def __init__(self, k1: float = 0.9, b: float = 0.4, threads: int = -1):
        self.k1, self.b, self.threads = k1, b, threads

    def fit(self, segments: list[np.ndarray]) -> None:
        import logging

        import bm25s

        logging.getLogger("bm25s").setLevel(logging.WARNING)
        terms, inverse = np.unique(np.concatenate(segments), return_inverse=True)
        edges = np.cumsum([len(segment) for segment in segments])[:-1]
        self.ids = [part.tolist() for part in np.split(inverse, edges)]
        self.vocabulary = {str(term): i for i, term in enumerate(terms)}
        self.index = bm25s.BM25(k1=self.k1, b=self.b, method="lucene", backend="numba")
        self.index.index((self.ids, self.vocabulary), show_progress=False)

    def nearest(self, queries: list[int], k: int) -> np.ndarray:
        from bm25s.tokenization import Tokenized

        asked = Tokenized(ids=[self.ids[query] for query in queries], vocab=self.vocabulary)
        found, scores = self.index.retrieve(asked, k=min(k + 1, len(self.ids)), show_progress=False, n_threads=self.threads)
        return others(np.where(scores > 0, found, -1), queries, k)


class Reference:
    """rank_bm25's BM25Okapi, for small corpora and for comparison."""

    def fit(self, segments: list[np.ndarray]) -> None:
        from rank_bm25 import BM25Okapi

        self.ids = [segment.tolist() for segment in segments]
        self.index = BM25Okapi(self.ids)

    def nearest(self, queries: list[int], k: int) -> np.ndarray:
        scores = np.stack([self.index.get_scores(self.ids[query]) for query in queries])
        found = np.argsort(-scores, axis=1, kind="stable")[:, : k + 1]
        return others(np.where(np.take_along_axis(scores, found, 1) > 0, found, -1), queries, k)


def others(found: np.ndarray, queries: list[int], k: int) -> np.ndarray:
    """Drops each query from its own list, wherever it stands (duplicates may precede it)."""
    result = np.full((len(queries), k), -1, np.int32)
    for row, (candidates, query) in enumerate(zip(found, queries, strict=True)):
        kept = [c for c in candidates.tolist() if c not in (query, -1)][:k]
        result[row, : len(kept)] = kept
    return result
