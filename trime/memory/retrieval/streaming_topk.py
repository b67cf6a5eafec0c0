"""The K largest of scores that come in tiles, on the CPU: what lies below the K-th so far is not even looked at twice.

A query keeps up to four times K candidates and a bar. What exceeds the bar is appended, without a branch that a processor could
guess wrong. When there is no more room, a histogram tells about where the K-th lies: what is surely below goes, and the bar
rises. (A heap would move log2 K entries for each, and ``topk`` would first write all scores down.)
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange

from trime.kernels.numba_kernels import numba_jit, run_kernel
from trime.types import Float, Int, Tensor

BINS = 512


class StreamingTopK:
    """Candidates of n queries: scores and the numbers (below 2^31) that they belong to."""

    def __init__(self, queries: int, k: int):
        self.k, room = k, 4 * k + BINS
        self.score = np.empty((queries, room), np.float32)
        self.index = np.empty((queries, room), np.int32)
        self.count, self.threshold = np.empty(queries, np.int64), np.empty(queries, np.float32)
        self.reset()

    def reset(self) -> None:
        """For other queries: memory that has been used before costs less than new one."""
        self.count[:], self.threshold[:] = 0, -np.inf

    def fits(self, queries: int, k: int) -> bool:
        """It has the size that is asked for."""
        return self.k == k and len(self.count) == queries

    def add(self, scores: Float[Tensor, "n m"], first: int) -> None:
        """Scores of the candidates ``first``, ``first`` + 1, and so on."""
        run_kernel(take_rows, scores.contiguous(), first, self.k, self.score, self.index, self.count, self.threshold)

    def add_tiles(
        self,
        flat: Float[Tensor, " f"],
        edges: Int[Tensor, " e"],
        place: Int[Tensor, " p"],
        cell: Int[Tensor, " p"],
        start: np.ndarray,
    ) -> None:
        """Scores of cells: those of query q are edges[q] to edges[q + 1], each with its place in ``flat``.

        Cell c holds the candidates start[c] to start[c + 1].
        """
        run_kernel(take_cells, flat, edges, place, cell, start, self.k, self.score, self.index, self.count, self.threshold)

    def result(self) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Score and number of the K largest, the largest first; (-inf, -1) where there are fewer."""
        run_kernel(finish, self.k, self.score, self.index, self.count)
        score, index = torch.from_numpy(self.score[:, : self.k]), torch.from_numpy(self.index[:, : self.k])
        missing = torch.arange(self.k) >= torch.from_numpy(self.count)[:, None]
        score, order = score.masked_fill(missing, -math.inf).sort(1, descending=True)
        return score, index.long().masked_fill(missing, -1).gather(1, order)


@numba_jit(parallel=True)
def take_rows(scores, first, k, score, index, count, threshold):  # type: ignore[no-untyped-def]
    for row in prange(len(scores)):
        take_run(row, scores[row], first, k, score, index, count, threshold)


@numba_jit(parallel=True)
def take_cells(flat, edges, place, cell, start, k, score, index, count, threshold):  # type: ignore[no-untyped-def]
    for row in prange(len(count)):
        for j in range(edges[row], edges[row + 1]):
            first, size = start[cell[j]], start[cell[j] + 1] - start[cell[j]]
            take_run(row, flat[place[j] : place[j] + size], first, k, score, index, count, threshold)


@numba_jit()
def take_run(row, scores, first, k, score, index, count, threshold):  # type: ignore[no-untyped-def]
    """A query's scores of the candidates ``first``, ``first`` + 1, and so on."""
    low = 0
    while low < len(scores):
        high = min(len(scores), low + make_room(row, k, score, index, count, threshold))
        many, least = count[row], threshold[row]
        for i in range(low, high):
            score[row, many], index[row, many] = scores[i], first + i
            many += scores[i] > least
        count[row], low = many, high


@numba_jit()
def make_room(row, k, score, index, count, threshold):  # type: ignore[no-untyped-def]
    """How many candidates may come, one at least: each is written before it is known whether it stays."""
    if count[row] > score.shape[1] - BINS // 2:
        count[row], threshold[row] = prune(score[row], index[row], k, count[row])
    return score.shape[1] - count[row]


@numba_jit()
def prune(score, index, k, count):  # type: ignore[no-untyped-def]
    """Drops candidates that are not among the k largest, if need be by exact selection; how many stay, and the new bar."""
    low = high = score[0]
    for i in range(count):
        low, high = min(low, score[i]), max(high, score[i])
    width = (high - low) / BINS
    if low > -np.inf and width > 0 and width < np.inf:
        bins = np.zeros(BINS, np.int64)
        for i in range(count):
            bins[min(BINS - 1, int((score[i] - low) / width))] += 1
        chosen, above = BINS - 1, bins[BINS - 1]
        while above < k:
            chosen -= 1
            above += bins[chosen]
        if above <= 2 * k:
            least, many = low + chosen * width - width / 64, 0  # some below the bin's edge: it is rounded
            for i in range(count):
                score[many], index[many] = score[i], index[i]
                many += score[i] > least
            if many <= 3 * k:
                return many, np.float32(least)
            count = many
    return k, keep(score, index, k, count)


@numba_jit()
def keep(score, index, k, count):  # type: ignore[no-untyped-def]
    """Moves the k largest to the front (quickselect) and returns the least of them."""
    low, high = 0, count - 1
    while low < high:
        pivot = max(min(score[low], score[high]), min(max(score[low], score[high]), score[(low + high) // 2]))
        i, j = low, high
        while i <= j:
            while score[i] > pivot:
                i += 1
            while score[j] < pivot:
                j -= 1
            if i <= j:
                score[i], score[j] = score[j], score[i]
                index[i], index[j] = index[j], index[i]
                i += 1
                j -= 1
        if k - 1 <= j:
            high = j
        elif k - 1 >= i:
            low = i
        else:
            break
    least = score[0]
    for i in range(k):
        least = min(least, score[i])
    return least


@numba_jit(parallel=True)
def finish(k, score, index, count):  # type: ignore[no-untyped-def]
    for row in prange(len(count)):
        if count[row] > k:
            many, _ = prune(score[row], index[row], k, count[row])
            if many > k:
                keep(score[row], index[row], k, many)
            count[row] = k
