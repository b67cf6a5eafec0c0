"""The K largest of scores that come in tiles, on the CPU: what lies below the K-th so far is not even looked at twice.

A query keeps up to twice K candidates and a bar. What exceeds the bar is appended; when there is no more room, the lower half
goes and the bar rises. (A heap would move log2 K entries for each, and ``topk`` would first write all scores down.)
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange

from trime.types import Float, Int, Tensor
from trime.vectors import compiled, on_threads


class Largest:
    """Candidates of n queries: scores and the numbers that they belong to."""

    def __init__(self, queries: int, k: int):
        self.k, room = k, 2 * k + 64
        self.score = np.empty((queries, room), np.float32)
        self.number = np.empty((queries, room), np.int64)
        self.held, self.bar = np.zeros(queries, np.int64), np.full(queries, -np.inf, np.float32)

    def take(self, scores: Float[Tensor, "n m"], first: int) -> None:
        """Scores of the candidates ``first``, ``first`` + 1, and so on."""
        on_threads(take_rows, scores.contiguous(), first, self.k, self.score, self.number, self.held, self.bar)

    def take_tiles(
        self, flat: Tensor, place: Int[Tensor, "n p"], cell: Int[Tensor, "n p"], start: np.ndarray, number: np.ndarray
    ) -> None:
        """For each query, the scores of p cells, each from its place in ``flat``; c has number[start[c] : start[c + 1]]."""
        on_threads(take_cells, flat, place, cell, start, number, self.k, self.score, self.number, self.held, self.bar)

    def best(self) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Score and number of the K largest, the largest first; (-inf, -1) where there are fewer."""
        on_threads(finish, self.k, self.score, self.number, self.held, self.bar)
        score, number = torch.from_numpy(self.score[:, : self.k]), torch.from_numpy(self.number[:, : self.k])
        missing = torch.arange(self.k) >= torch.from_numpy(self.held)[:, None]
        score, order = score.masked_fill(missing, -math.inf).sort(1, descending=True)
        return score, number.masked_fill(missing, -1).gather(1, order)


@compiled(parallel=True)
def take_rows(scores, first, k, score, number, held, bar):  # type: ignore[no-untyped-def]
    for row in prange(len(scores)):
        own = scores[row]
        for i in range(len(own)):
            if own[i] > bar[row]:
                append(row, own[i], first + i, k, score, number, held, bar)


@compiled(parallel=True)
def take_cells(flat, place, cell, start, numbers, k, score, number, held, bar):  # type: ignore[no-untyped-def]
    for row in prange(len(place)):
        for j in range(place.shape[1]):
            low, c = place[row, j], cell[row, j]
            base = start[c]
            for i in range(start[c + 1] - base):
                if flat[low + i] > bar[row]:
                    append(row, flat[low + i], numbers[base + i], k, score, number, held, bar)


@compiled()
def append(row, new, of, k, score, number, held, bar):  # type: ignore[no-untyped-def]
    """One candidate more; where there is no room left, only the k largest stay."""
    if held[row] == score.shape[1]:
        bar[row] = keep(score[row], number[row], k, held[row])
        held[row] = k
        if new <= bar[row]:
            return
    score[row, held[row]], number[row, held[row]] = new, of
    held[row] += 1


@compiled()
def keep(score, number, k, held):  # type: ignore[no-untyped-def]
    """Moves the k largest to the front (quickselect) and returns the least of them."""
    low, high = 0, held - 1
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
                number[i], number[j] = number[j], number[i]
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


@compiled(parallel=True)
def finish(k, score, number, held, bar):  # type: ignore[no-untyped-def]
    for row in prange(len(held)):
        if held[row] > k:
            bar[row] = keep(score[row], number[row], k, held[row])
            held[row] = k
