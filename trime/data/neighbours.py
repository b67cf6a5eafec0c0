"""SimSeg(I, c, k) of TRIME's Algorithm 1: each segment's k most similar other segments by BM25.

``BM25`` computes two variants: Lucene's idf, log(1 + (N - df + 1/2) / (df + 1/2)), is always positive; Okapi's, of rank_bm25,
is negative for terms in more than half the segments and is then replaced by a quarter of the mean idf, so that these terms
outrank rarer ones. ``RankBM25`` is rank_bm25 itself. Terms are token ids, or those of an analyzer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np

from trime.common.checks import check_number, short_repr
from trime.data.bm25 import index_of, nearest, self_ranges
from trime.data.corpus import Split
from trime.data.segments import Segments
from trime.errors import UserError

Analyzer = Literal["raw", "english"]  # of terms
Exclude = Literal["none", "document", "near_copies"]  # neighbours that a segment does not get
NEAR = 0.5  # share of a segment's score with itself: segments that score more are near copies
LUCENE = """a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to
was will with"""
STOP_WORDS = frozenset(LUCENE.split())  # of English
# Letters joined by . ' : and digits by . , ; ' are one word (Unicode annex 29, the rules that Lucene's tokenizer follows).
WORD = re.compile(r"\w+(?:(?:(?<=[^\W\d_])[.'’:·](?=[^\W\d_])|(?<=\d)[.,;'’](?=\d))\w+)*")
POSSESSIVE = re.compile(r"['’][sS]$")


def segment_terms(text: Split, segments: Segments, excluded_ids: list[int]) -> list[np.ndarray]:
    """Return the token ids of each segment for BM25, without the excluded (special) ones."""
    terms = []
    for offset, start, length in zip(segments.document_offset, segments.start, segments.length, strict=True):
        ids = np.asarray(text.tokens[offset + start : offset + start + length])
        terms.append(ids[~np.isin(ids, excluded_ids)])
    return terms


def english(text: str) -> list[str]:
    """Return the terms of a text as Lucene's EnglishAnalyzer does, the default of Pyserini (``analyzer=english``).

    Words lose their possessive, are lower-cased and Porter-stemmed; stop words are removed.
    """
    from snowballstemmer import stemmer

    words = (POSSESSIVE.sub("", word).lower() for word in WORD.findall(text))
    return stemmer("porter").stemWords([word for word in words if word not in STOP_WORDS])


class TermTable:
    """A map from vocabulary symbols to terms, which turns segments of token ids into segments of term ids.

    A symbol may have no term (a stop word, punctuation) or several (``well-known``); symbols with the same stem share one.
    """

    def __init__(self, symbols: Iterable[str], analyze: Callable[[str], list[str]]):
        numbers: dict[str, int] = {}
        terms = [[numbers.setdefault(term, len(numbers)) for term in analyze(symbol)] for symbol in symbols]
        self.count = np.array([len(symbol_terms) for symbol_terms in terms])
        self.start = np.cumsum(self.count) - self.count
        self.flat = np.array([number for symbol_terms in terms for number in symbol_terms], np.int64)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Return the term ids of token ids, in order."""
        count = self.count[tokens]
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return self.flat[np.repeat(self.start[tokens], count) + within]


def excluded_ranges(queries: list[int], document: np.ndarray, exclude: str) -> tuple[np.ndarray, float]:
    """Return the range of segments excluded for each query, and the maximum score ratio, for ``BM25.nearest``.

    ``document`` [n] is the document of each segment, in ascending order. ``exclude`` names segments that are no neighbours,
    besides the segment itself: none, segments of the same document, or near copies.
    """
    if exclude == "document":
        edges = [np.searchsorted(document, document[queries], side) for side in ("left", "right")]
        return np.stack(edges, 1), math.inf
    return self_ranges(np.array(queries)), NEAR if exclude == "near_copies" else math.inf


class BM25:
    """BM25 with compiled loops on all of PyTorch's threads; Lucene's variant, or ``okapi``.

    The stage pack applies the ``analyzer`` (raw or english) before ``fit``, and ``exclude`` by ``excluded_ranges``.
    """

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
                raise UserError(
                    f"segment {number} is {short_repr(segment)}: it must be a one-dimensional array of token numbers"
                )
            if len(segment) and not 0 <= segment.min() <= segment.max() < 2**31:
                raise UserError(f"segment {number} has tokens {segment.min()} to {segment.max()}: they must be below 2^31")
        self.segments = len(segments)
        self.index = index_of(segments, self.k1, self.b, self.okapi)

    def nearest(
        self, queries: list[int], k: int, excluded: np.ndarray | None = None, max_ratio: float = math.inf
    ) -> np.ndarray:
        """Return segment numbers [queries k], the most similar first; -1 where there are fewer.

        Left out are the segments from excluded[q, 0] to before excluded[q, 1] (by default only the query), and those that
        score more than ``max_ratio`` times the query's score with itself.
        """
        if not self.segments:
            raise UserError("no segments have been indexed: call fit(segments) first")
        check_number("k", k, at_least=1, whole=True)
        for query in queries:
            check_number("queries", query, at_least=0, at_most=self.segments - 1, whole=True)
        return nearest(self.index, np.array(queries), k, excluded, max_ratio)[0]


class RankBM25:
    """BM25Okapi of rank_bm25, for small corpora and for comparison; used as ``BM25`` is."""

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
        if math.isfinite(max_ratio):
            self_score = scores[np.arange(len(queries)), queries, None]
            scores[scores > np.where(self_score < 0, np.inf, max_ratio * self_score)] = 0
        excluded = self_ranges(np.array(queries)) if excluded is None else excluded
        number = np.arange(scores.shape[1])
        scores[(number >= excluded[:, :1]) & (number < excluded[:, 1:])] = 0
        top = np.argsort(-scores, axis=1, kind="stable")[:, :k]  # stable: of segments that score alike, the first
        top = np.where(np.take_along_axis(scores, top, 1) > 0, top, -1).astype(np.int32)
        return np.pad(top, ((0, 0), (0, k - top.shape[1])), constant_values=-1)
