"""The K largest of scores that come in tiles, on the CPU: scores below the K-th so far are read only once.

Each query has a buffer of at least four times K candidates and a threshold. Scores above the threshold are appended without a
branch that a processor could mispredict. When the buffer is full, a histogram locates the K-th score approximately: candidates
surely below it are removed, and the threshold rises. (A heap would move log2 K entries for each score, and ``topk`` would
first store all scores.)
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from trime.common.numba_kernels import HIDDEN, numba_jit, run_kernel
from trime.common.types import Float, Int, Tensor

BINS = 512  # of the histogram


class StreamingTopK:
    """The best candidates of n queries so far, with their scores and indices (below 2^31)."""

    def __init__(self, queries: int, k: int):
        self.k, room = k, 4 * k + BINS
        self.score = np.empty((queries, room), np.float32)
        self.index = np.empty((queries, room), np.int32)
        self.count, self.threshold = np.empty(queries, np.int64), np.empty(queries, np.float32)
        self.reset()

    def reset(self) -> None:
        """Remove all candidates; reused memory is cheaper than new memory."""
        self.count[:], self.threshold[:] = 0, -np.inf

    def add(self, scores: Float[Tensor, "n m"], first: int) -> None:
        """Add the scores of candidates ``first``, ``first`` + 1, and so on."""
        run_kernel(add_rows, scores.contiguous(), first, self.k, self.score, self.index, self.count, self.threshold)

    def add_tiles(
        self,
        flat: Float[Tensor, " f"],
        edges: Int[Tensor, " e"],
        offset: Int[Tensor, " p"],
        cell: Int[Tensor, " p"],
        start: np.ndarray,
    ) -> None:
        """Add the scores of cells: those of query q are edges[q] to edges[q + 1], each with its offset in ``flat``.

        Cell c consists of the candidates start[c] to start[c + 1].
        """
        run_kernel(add_cells, flat, edges, offset, cell, start, self.k, self.score, self.index, self.count, self.threshold)

    def result(self) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Return the scores and 32-bit indices of the K largest, the largest first; (-inf, -1) where there are fewer."""
        score, index = torch.empty(len(self.count), self.k), torch.empty(len(self.count), self.k, dtype=torch.int32)
        run_kernel(finish, self.k, self.score, self.index, self.count, score, index)
        return score, index


@numba_jit(parallel=True)
def add_rows(scores, first, k, score, index, count, threshold):  # type: ignore[no-untyped-def]
    """Add a row of scores to each query."""
    for row in prange(len(scores)):
        add_run(np.int64(row), scores[row], first, k, score, index, count, threshold)


@numba_jit(parallel=True)
def add_cells(flat, edges, offset, cell, start, k, score, index, count, threshold):  # type: ignore[no-untyped-def]
    """Add the scores of its cells to each query."""
    for row in prange(len(count)):
        for j in range(edges[row], edges[row + 1]):
            first, size = start[cell[j]], start[cell[j] + 1] - start[cell[j]]
            add_run(np.int64(row), flat[offset[j] : offset[j] + size], first, k, score, index, count, threshold)


@numba_jit()
def add_run(row, scores, first, k, score, index, count, threshold):  # type: ignore[no-untyped-def]
    """Add a query's scores of candidates ``first``, ``first`` + 1, and so on."""
    low = 0
    while low < len(scores):
        high = min(len(scores), low + make_room(row, k, score, index, count, threshold))
        size, minimum = count[row], threshold[row]
        for i in range(low, high):
            score[row, size], index[row, size] = scores[i], first + i
            size += scores[i] > minimum
        count[row], low = size, high


@numba_jit()
def make_room(row, k, score, index, count, threshold):  # type: ignore[no-untyped-def]
    """Return the room for candidates in the buffer, at least one; prune it if it is nearly full."""
    if count[row] > score.shape[1] - BINS // 2:
        count[row], threshold[row] = prune(score[row], index[row], k, count[row])
    return score.shape[1] - count[row]


@numba_jit()
def prune(score, index, k, count):  # type: ignore[no-untyped-def]
    """Remove candidates that are not among the k largest; return how many stay, and the new threshold.

    Exact selection is used where the histogram does not separate enough of them.
    """
    low = high = score[0]
    for i in range(count):
        low, high = min(low, score[i]), max(high, score[i])
    width = (high - low) / BINS
    if low > -np.inf and width > 0 and width < np.inf:
        bins = np.zeros(BINS, np.int64)
        for i in range(count):
            bins[min(BINS - 1, int((score[i] - low) / width))] += 1
        number, above = BINS - 1, bins[BINS - 1]
        while above < k:
            number -= 1
            above += bins[number]
        if above <= 2 * k:
            cut, size = low + number * width - width / 64, 0  # slightly below the bin's edge, which is rounded
            for i in range(count):
                score[size], index[size] = score[i], index[i]
                size += score[i] > cut
            if size <= 3 * k:
                return size, np.float32(cut)
            count = size
    return k, select(score, index, k, count)


@numba_jit()
def select(score, index, k, count):  # type: ignore[no-untyped-def]
    """Move the k largest to the front by quickselect; return the smallest of them."""
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
    smallest = score[0]
    for i in range(k):
        smallest = min(smallest, score[i])
    return smallest


@numba_jit(parallel=True)
def finish(k, score, index, count, best, best_index):  # type: ignore[no-untyped-def]
    """Copy each query's k largest candidates in falling order; (-inf, -1) where there are fewer."""
    for row in prange(len(count)):
        count[row] = finish_row(k, score[row], index[row], count[row], best[row], best_index[row])


@numba_jit()
def finish_row(k, score, index, count, best, best_index):  # type: ignore[no-untyped-def]
    """Copy a query's k largest candidates; return how many there are."""
    size = count
    if count > k:
        size, _ = prune(score, index, k, count)
        if size > k:
            select(score, index, k, size)
        size = k
    sort(score, index, size, best, best_index)
    best[size:], best_index[size:] = HIDDEN, np.int32(-1)
    return size


@numba_jit()
def sort(score, index, size, best, best_index):  # type: ignore[no-untyped-def]
    """Write the first ``size`` scores and their indices, the largest first: a radix sort of their bits, 8 at a time."""
    key, order = np.empty((2, size), np.uint32), np.empty((2, size), np.int32)
    bits = score[:size].view(np.uint32)
    # Ascending keys: those of negative numbers are their bits, those of others have all but the sign inverted.
    for i in range(size):
        key[0, i] = bits[i] if bits[i] >> 31 else bits[i] ^ np.uint32(0x7FFFFFFF)
        order[0, i] = i
    start = np.empty(256, np.int64)
    for step in range(4):
        source, target, shift = step % 2, 1 - step % 2, np.uint32(8 * step)
        start[:] = 0
        for i in range(size):
            start[(key[source, i] >> shift) & np.uint32(255)] += 1
        first = 0
        for digit in range(256):
            start[digit], first = first, first + start[digit]
        for i in range(size):
            digit = (key[source, i] >> shift) & np.uint32(255)
            key[target, start[digit]], order[target, start[digit]] = key[source, i], order[source, i]
            start[digit] += 1
    for i in range(size):
        best[i], best_index[i] = score[order[0, i]], index[order[0, i]]
