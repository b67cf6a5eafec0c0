"""SimSeg(I, c, k) of TRIME's Algorithm 1: each segment's most similar segments by BM25, itself left out. Terms are token ids.

``Fast`` and ``Sparse`` compute the same, the first by compiled loops, the second by sparse matrices of scipy; ``Reference`` is
rank_bm25. Two variants: Lucene's idf, log(1 + (N - df + 1/2) / (df + 1/2)), is always positive; Okapi's, of rank_bm25, is
negative for words of more than half the segments, which then count a quarter of the mean, so that they outrank rarer ones
(facts, section 4).
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import numpy as np

from trime.data.bm25 import alone, idf_of, index_of, nearest

SCORES = 2**24  # that Sparse holds at a time


EXCLUDE = ("none", "document", "near_copies")
NEAR = 0.5  # of a segment's own score: a segment that scores more is a near copy


def best(scores: np.ndarray, queries: list[int], k: int, hidden: np.ndarray | None, most: float) -> np.ndarray:
    """The k highest of each row, of equal ones the first; -1 where fewer lie above 0."""
    if math.isfinite(most):
        own = scores[np.arange(len(queries)), queries, None]
        scores[scores > np.where(own < 0, np.inf, most * own)] = 0
    hidden = alone(np.array(queries)) if hidden is None else hidden
    place = np.arange(scores.shape[1])
    scores[(place >= hidden[:, :1]) & (place < hidden[:, 1:])] = 0
    found = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    found = np.where(np.take_along_axis(scores, found, 1) > 0, found, -1).astype(np.int32)
    return np.pad(found, ((0, 0), (0, k - found.shape[1])), constant_values=-1)


@runtime_checkable
class Backend(Protocol):
    """``analyzer`` names what is compared (``trime.data.analyzers``): stage pack applies it before ``fit``.

    ``exclude`` names what is no neighbour besides the segment itself: nothing, segments of the same document, or near copies.
    """

    analyzer: str
    exclude: str

    def fit(self, segments: list[np.ndarray]) -> None:
        """Indexes the segments."""

    def nearest(self, queries: list[int], k: int, hidden: np.ndarray | None = None, most: float = math.inf) -> np.ndarray:
        """[queries k] of segment numbers, most similar first; -1 where fewer.

        Segments hidden[q, 0] to before hidden[q, 1] are left out (see ``hidden_of``; by default the query alone), and those
        that score more than ``most`` times what the query scores itself.
        """


def hidden_of(queries: list[int], document: np.ndarray, exclude: str) -> tuple[np.ndarray, float]:
    """Return what is no neighbour of each query, as ``Backend.nearest`` takes it; ``document`` [n]: rising, of each segment."""
    if exclude == "document":
        edges = [np.searchsorted(document, document[queries], side) for side in ("left", "right")]
        return np.stack(edges, 1), math.inf
    return alone(np.array(queries)), NEAR if exclude == "near_copies" else math.inf


class Fast:
    """Compiled loops on all of PyTorch's threads; Lucene's variant, or ``okapi``."""

    def __init__(self, k1: float = 0.9, b: float = 0.4, okapi: bool = False, analyzer: str = "raw", exclude: str = "none"):
        self.k1, self.b, self.okapi, self.analyzer, self.exclude = k1, b, okapi, analyzer, exclude

    def fit(self, segments: list[np.ndarray]) -> None:
        self.index = index_of(segments, self.k1, self.b, self.okapi)

    def nearest(self, queries: list[int], k: int, hidden: np.ndarray | None = None, most: float = math.inf) -> np.ndarray:
        return nearest(self.index, np.array(queries), k, hidden, most)[0]


class Sparse:
    """The same by products of scipy's sparse matrices."""

    def __init__(self, k1: float = 0.9, b: float = 0.4, okapi: bool = False, analyzer: str = "raw", exclude: str = "none"):
        self.k1, self.b, self.okapi, self.analyzer, self.exclude = k1, b, okapi, analyzer, exclude

    def fit(self, segments: list[np.ndarray]) -> None:
        from scipy.sparse import csr_matrix

        lengths = np.array([len(segment) for segment in segments])
        owner, term = np.repeat(np.arange(len(segments)), lengths), np.concatenate(segments)
        self.count = csr_matrix((np.ones(len(term)), (owner, term)))
        impact = self.count.copy()
        used, df = np.unique(impact.indices, return_counts=True)
        idf = np.zeros(impact.shape[1])
        idf[used] = idf_of(df, len(segments), self.okapi)
        norm = self.k1 * (1 - self.b + self.b * lengths / max(1.0, lengths.mean()))
        impact.data = idf[impact.indices] / (1 + np.repeat(norm, np.diff(impact.indptr)) / impact.data)
        self.impact = impact.T.tocsr()

    def nearest(self, queries: list[int], k: int, hidden: np.ndarray | None = None, most: float = math.inf) -> np.ndarray:
        rows = max(1, SCORES // self.count.shape[0])
        blocks = [slice(low, low + rows) for low in range(0, len(queries), rows)]
        scores = ((self.count[queries[block]] @ self.impact).toarray() for block in blocks)
        hidden = alone(np.array(queries)) if hidden is None else hidden
        found = [best(own, queries[block], k, hidden[block], most) for own, block in zip(scores, blocks, strict=True)]
        return np.concatenate(found)


class Reference:
    """rank_bm25's BM25Okapi, for small corpora and for comparison."""

    def __init__(self, analyzer: str = "raw", exclude: str = "none"):
        self.analyzer, self.exclude = analyzer, exclude

    def fit(self, segments: list[np.ndarray]) -> None:
        from rank_bm25 import BM25Okapi

        self.ids = [segment.tolist() for segment in segments]
        self.index = BM25Okapi(self.ids)

    def nearest(self, queries: list[int], k: int, hidden: np.ndarray | None = None, most: float = math.inf) -> np.ndarray:
        scores = np.stack([self.index.get_scores(self.ids[query]) for query in queries])
        return best(scores, queries, k, hidden, most)
