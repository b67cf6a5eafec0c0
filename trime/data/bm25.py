"""BM25 of segments with segments, by blocks: the k best of a corpus for each of its own segments, exactly.

A score is the sum over a query's terms of its count there times what the term gives to the other segment (its impact). Words
that stand in many segments make up most of that work; for them it is one dense matrix product. The postings of all others
are added to its result, row by row, and the best are taken from it before the next block of segments comes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numba import prange

from trime.kernels.numba_kernels import numba_jit, run_kernel
from trime.types import Tensor

ROWS, COLUMNS = 512, 2**14  # of scores that are held at once: 32 MiB
FREQUENT = 0.08  # of all segments: from there on a column of a matrix product is cheaper than a list of postings
LANES, LOOK = 64, 1024  # scores that are looked at together


class Terms(NamedTuple):
    """What stands in each segment: its different terms, those of most segments first, how often, and impacts."""

    edges: np.ndarray  # [n + 1]
    term: np.ndarray
    times: np.ndarray
    impact: np.ndarray


class Block(NamedTuple):
    """Impacts on some segments: of frequent terms as a matrix [m frequent], of the others by term."""

    dense: Tensor
    start: np.ndarray  # [terms - frequent + 1] of each term's postings
    segment: np.ndarray  # within the block
    impact: np.ndarray


class Index(NamedTuple):
    terms: Terms
    frequent: int
    blocks: list[Block]


def index_of(segments: list[np.ndarray], k1: float, b: float, okapi: bool = False) -> Index:
    """Lucene's impacts, or those of rank_bm25's Okapi (``trime.data.neighbours`` says what sets them apart)."""
    n, lengths = len(segments), np.array([len(segment) for segment in segments], np.int64)
    edges, term, count, df = terms_of(np.concatenate(segments).astype(np.int32), lengths)
    idf = idf_of(df, n, okapi)
    norm = (k1 * (1 - b + b * lengths / max(1.0, lengths.mean()))).astype(np.float32)
    impact = idf.astype(np.float32)[term] * (count / (count + np.repeat(norm, np.diff(edges)))).astype(np.float32)
    terms, frequent = Terms(edges, term, count, impact), int((df > FREQUENT * n).sum())
    return Index(terms, frequent, [block_of(terms, len(df), frequent, low, low + COLUMNS) for low in range(0, n, COLUMNS)])


def terms_of(flat: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Edges, terms and counts of segments, and how many hold each term; those of most segments are numbered first."""
    cuts, edges = np.r_[0, lengths.cumsum()], np.zeros(len(lengths) + 1, np.int64)
    df = np.zeros(int(flat.max(initial=0)) + 1, np.int64)
    count_segments(flat, cuts, df)
    order = np.argsort(-df, kind="stable")[: np.count_nonzero(df)]
    number, count = np.empty(len(df), np.int32), np.empty(len(flat), np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    total = count_terms(flat, number, cuts, edges, count)
    return edges, flat[:total].copy(), count[:total].copy(), df[order]


@numba_jit()
def count_segments(flat, cuts, df):  # type: ignore[no-untyped-def]
    """In how many segments each term stands."""
    seen = np.full(len(df), -1, np.int64)
    for number in range(len(cuts) - 1):
        for term in flat[cuts[number] : cuts[number + 1]]:
            if seen[term] != number:
                seen[term] = number
                df[term] += 1


@numba_jit()
def count_terms(flat, number, cuts, edges, count):  # type: ignore[no-untyped-def]
    """In place: each segment's part of ``flat`` becomes its different terms by number, one segment after the other."""
    total = 0
    for segment in range(len(cuts) - 1):
        own = np.sort(number[flat[cuts[segment] : cuts[segment + 1]]])
        for i in range(len(own)):
            if i and own[i] == own[i - 1]:
                count[total - 1] += 1
            else:
                flat[total], count[total] = own[i], 1
                total += 1
        edges[segment + 1] = total
    return total


def block_of(terms: Terms, known: int, frequent: int, low: int, high: int) -> Block:
    """The impacts on segments low to high, or to the last."""
    edges = terms.edges[low : high + 1]
    term, impact = terms.term[edges[0] : edges[-1]], terms.impact[edges[0] : edges[-1]]
    start = np.r_[0, np.bincount(term[term >= frequent] - frequent, minlength=known - frequent).cumsum()]
    dense = np.zeros((len(edges) - 1, frequent), np.float32)
    segment, rare = np.empty(start[-1], np.uint32), np.empty(start[-1], np.float32)
    fill(edges - edges[0], term, impact, dense, start[:-1].copy(), segment, rare)
    return Block(torch.from_numpy(dense), start.astype(np.int32), segment, rare)


@numba_jit()
def fill(edges, term, impact, dense, place, segment, rare):  # type: ignore[no-untyped-def]
    """Every impact to its column, or to where its term's next posting goes (``place``)."""
    frequent = dense.shape[1]
    for number in range(len(edges) - 1):
        for j in range(edges[number], edges[number + 1]):
            if term[j] < frequent:
                dense[number, term[j]] = impact[j]
            else:
                p = place[term[j] - frequent]
                segment[p], rare[p] = number, impact[j]
                place[term[j] - frequent] += 1


def nearest(
    index: Index, queries: np.ndarray, k: int, hidden: np.ndarray | None = None, most: float = math.inf
) -> tuple[np.ndarray, np.ndarray]:
    """[q k] of segments and their scores, the best first; -1 where fewer score above 0.

    Segments hidden[q, 0] to before hidden[q, 1] are left out (by default the query alone), and those that score more than
    ``most`` times what the query scores itself.
    """
    hidden = alone(queries) if hidden is None else hidden
    limit = np.full(len(queries), -1, np.float32)  # no limit
    if most < math.inf:
        limit[:] = most * own_scores(index.terms, queries)
    number, score = np.full((len(queries), k), -1, np.int32), np.zeros((len(queries), k), np.float32)
    for low in range(0, len(queries), ROWS):
        rows = slice(low, low + ROWS)
        asked, found = np.asarray(queries[rows], np.int64), (number[rows], score[rows])
        weight = torch.zeros(len(asked), index.frequent)
        run_kernel(fill_weights, *index.terms[:3], asked, weight)
        for place, block in enumerate(index.blocks):
            sums = weight @ block.dense.T
            left_out = hidden[rows], limit[rows]
            run_kernel(finish, *index.terms[:3], asked, index.frequent, *block[1:], place * COLUMNS, *left_out, sums, *found)
        arrange(*found)
    return number, score


def own_scores(terms: Terms, queries: np.ndarray) -> np.ndarray:
    """What each query scores itself."""
    sums = np.r_[0, np.cumsum(terms.times * terms.impact.astype(np.float64))]
    return sums[terms.edges[queries + 1]] - sums[terms.edges[queries]]


@numba_jit()
def fill_weights(edges, term, count, queries, weight):  # type: ignore[no-untyped-def]
    """How often each frequent term stands in the queries."""
    for row in range(len(queries)):
        for j in range(edges[queries[row]], edges[queries[row] + 1]):
            if term[j] < weight.shape[1]:
                weight[row, term[j]] = count[j]


@numba_jit(parallel=True, reorder=True)
def finish(  # type: ignore[no-untyped-def]
    edges, term, count, queries, frequent, start, segment, impact, low, hidden, limit, sums, number, score
):
    """Adds the rare terms to the sums of a block, and takes the best of them into heaps whose worst stands first."""
    for row in prange(len(queries)):
        query, own = queries[row], sums[row]
        for j in range(edges[query], edges[query + 1]):
            t, times = term[j] - frequent, np.float32(count[j])
            if t >= 0:
                for p in range(start[t], start[t + 1]):
                    own[segment[p]] += times * impact[p]
        own[max(hidden[row, 0] - low, 0) : max(hidden[row, 1] - low, 0)] = 0
        if limit[row] >= 0:
            own[own > limit[row]] = 0
        keep_best(own, low, number[row], score[row])


@numba_jit(reorder=True)
def keep_best(own, low, number, score):  # type: ignore[no-untyped-def]
    """Into the heap goes what scores above its worst; lanes first, for a maximum over neighbours is no vector instruction."""
    most = np.empty(LANES, np.float32)
    for first in range(0, len(own), LOOK):
        part = own[first : first + LOOK]
        most[:] = 0
        for left in range(0, len(part) - LANES + 1, LANES):
            lanes = part[left : left + LANES]
            for i in range(LANES):
                most[i] = max(most[i], lanes[i])
        for i in range(LANES):
            if most[i] > score[0]:
                offer(part, i, low + first, number, score)
        for i in range(len(part) - len(part) % LANES, len(part)):
            if part[i] > score[0]:
                replace_worst(score, number, part[i], low + first + i)


@numba_jit()
def offer(part, lane, low, number, score):  # type: ignore[no-untyped-def]
    """A lane's scores to the heap."""
    for i in range(lane, len(part) - len(part) % LANES, LANES):
        if part[i] > score[0]:
            replace_worst(score, number, part[i], low + i)


@numba_jit()
def replace_worst(score, number, new, place):  # type: ignore[no-untyped-def]
    """Puts a segment into a heap in place of its worst: the lowest score, of equal ones the last."""
    hole, size = 0, len(score)
    while 2 * hole + 1 < size:
        child = 2 * hole + 1
        if child + 1 < size and before(score, number, child, child + 1):
            child += 1
        if score[child] > new or (score[child] == new and number[child] < place):
            break
        score[hole], number[hole] = score[child], number[child]
        hole = child
    score[hole], number[hole] = new, place


@numba_jit()
def before(score, number, one, other):  # type: ignore[no-untyped-def]
    """One entry stands before another: it scores higher, or the same and comes first."""
    return score[one] > score[other] or (score[one] == score[other] and number[one] < number[other])


@numba_jit()
def arrange(number, score):  # type: ignore[no-untyped-def]
    """Heaps to lists, the best first, equal ones by number."""
    for row in range(len(number)):
        order = np.argsort(number[row])
        order = order[np.argsort(-score[row][order], kind="mergesort")]
        number[row], score[row] = number[row][order], score[row][order]


def idf_of(df: np.ndarray, segments: int, okapi: bool) -> np.ndarray:
    """The weight of terms that stand in ``df`` of the segments."""
    if not okapi:
        return np.log1p((segments - df + 0.5) / (df + 0.5))
    idf = np.log(segments - df + 0.5) - np.log(df + 0.5)
    return np.where(idf < 0, 0.25 * idf.mean(), idf)


def alone(queries: np.ndarray) -> np.ndarray:
    """Return, as ``Backend.nearest`` takes it, that each query alone is left out."""
    return np.stack([queries, queries + 1], 1)
