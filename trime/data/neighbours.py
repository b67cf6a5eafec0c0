"""SimSeg(I, c, k) of TRIME's Algorithm 1: each segment's k most similar other segments by BM25. Terms are token ids.

``Fast`` and ``Sparse`` compute the same, the first with compiled loops, the second with scipy's sparse matrices;
``Reference`` is rank_bm25. Two variants: Lucene's idf, log(1 + (N - df + 1/2) / (df + 1/2)), is always positive; Okapi's,
of rank_bm25, is negative for terms in more than half the segments and is then replaced by a quarter of the mean idf, so
that these terms outrank rarer ones.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from trime.checks import check_number, shown
from trime.data.bm25 import idf_of, index_of, nearest, self_ranges
from trime.data.corpus import Split
from trime.data.segments import Segments
from trime.errors import UserError

Analyzer = Literal["raw", "english"]  # of terms
Exclude = Literal["none", "document", "near_copies"]  # neighbours that a segment does not get
SCORES = 2**24  # maximum number of scores that Sparse holds at a time
NEAR = 0.5  # share of a segment's score with itself: segments that score more are near copies


def top_segments(scores: np.ndarray, queries: list[int], k: int, excluded: np.ndarray | None, max_ratio: float) -> np.ndarray:
    """Return the k highest-scoring segments of each row, ties in order; -1 where fewer score above 0."""
    if math.isfinite(max_ratio):
        self_score = scores[np.arange(len(queries)), queries, None]
        scores[scores > np.where(self_score < 0, np.inf, max_ratio * self_score)] = 0
    excluded = self_ranges(np.array(queries)) if excluded is None else excluded
    number = np.arange(scores.shape[1])
    scores[(number >= excluded[:, :1]) & (number < excluded[:, 1:])] = 0
    top = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    top = np.where(np.take_along_axis(scores, top, 1) > 0, top, -1).astype(np.int32)
    return np.pad(top, ((0, 0), (0, k - top.shape[1])), constant_values=-1)


@runtime_checkable
class Backend(Protocol):
    """A search engine for similar segments.

    ``analyzer`` names the analyzer (``trime.data.analyzers``) that the stage pack applies before ``fit``. ``exclude`` names
    the segments that are not neighbours besides the segment itself: none, those of the same document, or near copies.
    """

    analyzer: Analyzer
    exclude: Exclude

    def fit(self, segments: list[np.ndarray]) -> None:
        """Index the segments."""

    def nearest(
        self, queries: list[int], k: int, excluded: np.ndarray | None = None, max_ratio: float = math.inf
    ) -> np.ndarray:
        """Return segment numbers [queries k], the most similar first; -1 where there are fewer.

        Left out are the segments from excluded[q, 0] to before excluded[q, 1] (see ``excluded_ranges``; by default only the
        query), and those that score more than ``max_ratio`` times the query's score with itself.
        """


def segment_terms(text: Split, segments: Segments, excluded_ids: list[int]) -> list[np.ndarray]:
    """Return the token ids of each segment for BM25, without the excluded (special) ones."""
    terms = []
    for offset, start, length in zip(segments.document_offset, segments.start, segments.length, strict=True):
        ids = np.asarray(text.tokens[offset + start : offset + start + length])
        terms.append(ids[~np.isin(ids, excluded_ids)])
    return terms


def excluded_ranges(queries: list[int], document: np.ndarray, exclude: str) -> tuple[np.ndarray, float]:
    """Return the range of segments excluded for each query, and the maximum score ratio, for ``Backend.nearest``.

    ``document`` [n] is the document of each segment, in ascending order.
    """
    if exclude == "document":
        edges = [np.searchsorted(document, document[queries], side) for side in ("left", "right")]
        return np.stack(edges, 1), math.inf
    return self_ranges(np.array(queries)), NEAR if exclude == "near_copies" else math.inf


class Fast:
    """BM25 with compiled loops on all of PyTorch's threads; Lucene's variant, or ``okapi``."""

    def __init__(
        self, k1: float = 0.9, b: float = 0.4, okapi: bool = False, analyzer: Analyzer = "raw", exclude: Exclude = "none"
    ):
        check_number("k1", k1, at_least=0)
        check_number("b", b, at_least=0, at_most=1)
        self.k1, self.b, self.okapi, self.analyzer, self.exclude = k1, b, okapi, analyzer, exclude
        self.segments = 0

    def fit(self, segments: list[np.ndarray]) -> None:
        """Index the segments; UserError unless they are one-dimensional arrays of token numbers."""
        if not len(segments):
            raise UserError("segments is empty: BM25 needs at least one segment")
        for number, segment in enumerate(segments):
            if not isinstance(segment, np.ndarray) or segment.ndim != 1 or segment.dtype.kind not in "iu":
                raise UserError(f"segment {number} is {shown(segment)}: it must be a one-dimensional array of token numbers")
            if len(segment) and not 0 <= segment.min() <= segment.max() < 2**31:
                raise UserError(f"segment {number} has tokens {segment.min()} to {segment.max()}: they must be below 2^31")
        self.segments = len(segments)
        self.index = index_of(segments, self.k1, self.b, self.okapi)

    def nearest(
        self, queries: list[int], k: int, excluded: np.ndarray | None = None, max_ratio: float = math.inf
    ) -> np.ndarray:
        if not self.segments:
            raise UserError("no segments have been indexed: call fit(segments) first")
        check_number("k", k, at_least=1, whole=True)
        for query in queries:
            check_number("queries", query, at_least=0, at_most=self.segments - 1, whole=True)
        return nearest(self.index, np.array(queries), k, excluded, max_ratio)[0]


class Sparse:
    """BM25 with products of scipy's sparse matrices; Lucene's variant, or ``okapi``. Its results are those of ``Fast``."""

    def __init__(
        self, k1: float = 0.9, b: float = 0.4, okapi: bool = False, analyzer: Analyzer = "raw", exclude: Exclude = "none"
    ):
        self.k1, self.b, self.okapi, self.analyzer, self.exclude = k1, b, okapi, analyzer, exclude

    def fit(self, segments: list[np.ndarray]) -> None:
        from scipy.sparse import csr_matrix

        lengths = np.array([len(segment) for segment in segments])
        owner, term = np.repeat(np.arange(len(segments)), lengths), np.concatenate(segments)
        shape = len(segments), int(term.max(initial=0)) + 1  # segments at the end may have no terms
        self.count = csr_matrix((np.ones(len(term)), (owner, term)), shape=shape)
        impact = self.count.copy()
        used, df = np.unique(impact.indices, return_counts=True)
        idf = np.zeros(impact.shape[1])
        idf[used] = idf_of(df, len(segments), self.okapi)
        norm = self.k1 * (1 - self.b + self.b * lengths / max(1.0, lengths.mean()))
        impact.data = idf[impact.indices] / (1 + np.repeat(norm, np.diff(impact.indptr)) / impact.data)
        self.impact = impact.T.tocsr()

    def nearest(
        self, queries: list[int], k: int, excluded: np.ndarray | None = None, max_ratio: float = math.inf
    ) -> np.ndarray:
        rows = max(1, SCORES // self.count.shape[0])
        blocks = [slice(low, low + rows) for low in range(0, len(queries), rows)]
        scores = ((self.count[queries[block]] @ self.impact).toarray() for block in blocks)
        excluded = self_ranges(np.array(queries)) if excluded is None else excluded
        parts = [
            top_segments(part, queries[block], k, excluded[block], max_ratio)
            for part, block in zip(scores, blocks, strict=True)
        ]
        return np.concatenate(parts)


class Reference:
    """BM25Okapi of rank_bm25, for small corpora and for comparison."""

    def __init__(self, analyzer: Analyzer = "raw", exclude: Exclude = "none"):
        self.analyzer, self.exclude = analyzer, exclude

    def fit(self, segments: list[np.ndarray]) -> None:
        from rank_bm25 import BM25Okapi

        self.ids = [segment.tolist() for segment in segments]
        self.index = BM25Okapi(self.ids)

    def nearest(
        self, queries: list[int], k: int, excluded: np.ndarray | None = None, max_ratio: float = math.inf
    ) -> np.ndarray:
        scores = np.stack([self.index.get_scores(self.ids[query]) for query in queries])
        return top_segments(scores, queries, k, excluded, max_ratio)
