"""Exact BM25 between the segments of a corpus: the k best segments for each segment, computed in blocks.

A score is the sum over the query's terms of the term's count in the query times its impact in the other segment. Terms
of many segments make up most of that work; for them it is one dense matrix product. The postings of all other terms
are added to the product, row by row, and the best segments are selected before the next block is scored.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numba import prange

from trime.common.numba_kernels import numba_jit, run_kernel
from trime.common.types import Tensor

ROWS, COLUMNS = 512, 2**14  # of a block of scores: 32 MiB
FREQUENT = 0.08  # share of the segments above which a column of a matrix product is cheaper than a list of postings
LANES, SCAN = 64, 1024  # scores that are compared together


class Terms(NamedTuple):
    """The distinct terms of each segment with counts and impacts; terms are numbered by falling document frequency."""

    edges: np.ndarray  # [n + 1]
    term: np.ndarray
    counts: np.ndarray
    impact: np.ndarray


class Block(NamedTuple):
    """Impacts in some segments: of frequent terms as a matrix [m frequent], of the others as postings."""

    dense: Tensor
    start: np.ndarray  # [terms - frequent + 1] of each term's postings
    segment: np.ndarray  # within the block
    impact: np.ndarray


class Index(NamedTuple):
    """The index of a corpus; ``frequent`` is the number of frequent terms."""

    terms: Terms
    frequent: int
    blocks: list[Block]


def index_of(segments: list[np.ndarray], k1: float, b: float, okapi: bool = False) -> Index:
    """Index segments with Lucene's impacts, or with those of rank_bm25's Okapi (see ``trime.data.neighbours``)."""
    n, lengths = len(segments), np.array([len(segment) for segment in segments], np.int64)
    lows, vocabulary = range(0, n, COLUMNS), 1 + max(int(segment.max(initial=0)) for segment in segments)

    def distinct(low: int, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return segment * vocabulary + the term's number for each term of a block's segments, in order, and its counts."""
        part = segments[low : low + COLUMNS]
        pairs = np.repeat(np.arange(len(part)), lengths[low : low + COLUMNS]) * vocabulary + number[np.concatenate(part)]
        pairs.sort()  # several times faster than np.unique
        first = np.flatnonzero(np.diff(pairs, prepend=-1))
        return pairs[first], np.diff(first, append=len(pairs))

    same, df = np.arange(vocabulary), np.zeros(vocabulary, np.int64)
    for low in lows:
        df += np.bincount(distinct(low, same)[0] % vocabulary, minlength=vocabulary)
    # Numbers by falling document frequency put the frequent terms, which become columns of the matrix, first.
    order = np.argsort(-df, kind="stable")[: np.count_nonzero(df)]
    number, df = np.zeros(vocabulary, np.int64), df[order]
    number[order] = np.arange(len(order))
    terms_of, counts, sizes = [], [], []
    for low in lows:
        pairs, count = distinct(low, number)
        segment, term = np.divmod(pairs, vocabulary)
        terms_of.append(term.astype(np.int32))
        counts.append(count.astype(np.int32))
        sizes.append(np.bincount(segment, minlength=min(COLUMNS, n - low)))
    term, count, edges = np.concatenate(terms_of), np.concatenate(counts), np.r_[0, np.concatenate(sizes).cumsum()]
    if okapi:
        idf = np.log(n - df + 0.5) - np.log(df + 0.5)
        idf = np.where(idf < 0, 0.25 * idf.mean(), idf)
    else:
        idf = np.log1p((n - df + 0.5) / (df + 0.5))
    norm = (k1 * (1 - b + b * lengths / max(1.0, lengths.mean()))).astype(np.float32)
    impact = idf.astype(np.float32)[term] * (count / (count + np.repeat(norm, np.diff(edges)))).astype(np.float32)
    terms, frequent = Terms(edges, term, count, impact), int((df > FREQUENT * n).sum())
    return Index(terms, frequent, [block_of(terms, len(df), frequent, low, low + COLUMNS) for low in lows])


def block_of(terms: Terms, vocabulary: int, frequent: int, low: int, high: int) -> Block:
    """Return the impacts in segments ``low`` to ``high``, or to the last one; ``vocabulary`` is the number of terms."""
    edges = terms.edges[low : high + 1]
    term, impact = terms.term[edges[0] : edges[-1]], terms.impact[edges[0] : edges[-1]]
    segment, is_frequent = np.repeat(np.arange(len(edges) - 1, dtype=np.uint32), np.diff(edges)), term < frequent
    dense = np.zeros((len(edges) - 1, frequent), np.float32)
    dense[segment[is_frequent], term[is_frequent]] = impact[is_frequent]
    segment, impact, term = segment[~is_frequent], impact[~is_frequent], term[~is_frequent] - frequent
    by_term = np.argsort(term, kind="stable")
    start = np.r_[0, np.bincount(term, minlength=vocabulary - frequent).cumsum()]
    return Block(torch.from_numpy(dense), start.astype(np.int32), segment[by_term], impact[by_term])


def nearest(
    index: Index, queries: np.ndarray, k: int, excluded: np.ndarray | None = None, max_ratio: float = math.inf
) -> tuple[np.ndarray, np.ndarray]:
    """Return the best segments [q k] and their scores, in falling order; -1 where fewer score above 0.

    Left out are the segments from excluded[q, 0] to before excluded[q, 1] (by default only the query), and those that score
    more than ``max_ratio`` times the query's score with itself.
    """
    excluded = self_ranges(queries) if excluded is None else excluded
    terms, limit = index.terms, np.full(len(queries), -1, np.float32)  # -1: no limit
    if max_ratio < math.inf:
        sums = np.r_[0, np.cumsum(terms.counts * terms.impact.astype(np.float64))]
        limit[:] = max_ratio * (sums[terms.edges[queries + 1]] - sums[terms.edges[queries]])
    number, score = np.full((len(queries), k), -1, np.int32), np.zeros((len(queries), k), np.float32)
    for low in range(0, len(queries), ROWS):
        rows = slice(low, low + ROWS)
        query, best = np.asarray(queries[rows], np.int64), (number[rows], score[rows])
        weight = torch.zeros(len(query), index.frequent)
        for row, (start, end) in zip(weight.numpy(), zip(terms.edges[query], terms.edges[query + 1], strict=True), strict=True):
            end = start + np.searchsorted(terms.term[start:end], index.frequent)  # a segment's frequent terms come first
            row[terms.term[start:end]] = terms.counts[start:end]
        for block_number, block in enumerate(index.blocks):
            scores = weight @ block.dense.T
            left_out = excluded[rows], limit[rows]
            run_kernel(
                score_block, *terms[:3], query, index.frequent, *block[1:], block_number * COLUMNS, *left_out, scores, *best
            )
    order = np.lexsort((number, -score), axis=1)
    return np.take_along_axis(number, order, 1), np.take_along_axis(score, order, 1)


@numba_jit(parallel=True)
def score_block(  # type: ignore[no-untyped-def]
    edges, term, count, queries, frequent, start, segment, impact, low, excluded, limit, sums, number, score
):
    """Add the rare terms to the sums of a block, and insert the best scores into heaps with the worst first."""
    for row in prange(len(queries)):
        query, scores = queries[row], sums[row]
        for j in range(edges[query], edges[query + 1]):
            t, times = term[j] - frequent, np.float32(count[j])
            if t >= 0:
                for p in range(start[t], start[t + 1]):
                    scores[segment[p]] += times * impact[p]
        scores[max(excluded[row, 0] - low, 0) : max(excluded[row, 1] - low, 0)] = 0
        if limit[row] >= 0:
            scores[scores > limit[row]] = 0
        keep_best(scores, low, number[row], score[row])


@numba_jit()
def keep_best(scores, low, number, score):  # type: ignore[no-untyped-def]
    """Insert the scores that beat the heap's worst."""
    maximum = np.empty(LANES, np.float32)
    for first in range(0, len(scores), SCAN):
        part = scores[first : first + SCAN]
        whole = len(part) - len(part) % LANES
        # The maximum of each lane first: it compiles to vector instructions, and few lanes hold one of the best scores.
        maximum[:] = 0
        for left in range(0, whole, LANES):
            lanes = part[left : left + LANES]
            for i in range(LANES):
                maximum[i] = max(maximum[i], lanes[i])
        for i in range(LANES):
            if maximum[i] > 0 and maximum[i] >= score[0]:
                for j in range(i, whole, LANES):
                    insert(score, number, part[j], low + first + j)
        for j in range(whole, len(part)):
            insert(score, number, part[j], low + first + j)


@numba_jit()
def insert(score, number, new, segment):  # type: ignore[no-untyped-def]
    """Replace a heap's worst segment (the lowest score, of ties the last) by another one, if that is better."""
    if new < score[0] or new <= 0 or (new == score[0] and segment >= number[0]):
        return
    hole, size = 0, len(score)
    while 2 * hole + 1 < size:
        child = 2 * hole + 1
        other = child + 1
        if other < size and (score[child] > score[other] or (score[child] == score[other] and number[child] < number[other])):
            child = other
        if score[child] > new or (score[child] == new and number[child] < segment):
            break
        score[hole], number[hole] = score[child], number[child]
        hole = child
    score[hole], number[hole] = new, segment


def self_ranges(queries: np.ndarray) -> np.ndarray:
    """Return ranges [q 2] that exclude only each query itself, for ``nearest``."""
    return np.stack([queries, queries + 1], 1)
