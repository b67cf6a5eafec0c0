"""Segments with large lexical overlap in one batch, for external memory (TRIME section 4.3, Algorithm 1)."""

from __future__ import annotations

import numpy as np

from trime.data.batching.base import check_size, chunks, generator, shuffled
from trime.data.segments import Segments


class BM25:
    """``size`` segments a batch along a greedy chain of BM25 neighbours; ``k`` is SimSeg's k.

    conf/neighbours chooses what finds them (see trime.data.neighbours).
    """

    needs_neighbours = True

    def __init__(self, size: int, k: int, seed: int):
        self.size, self.k, self.seed = check_size(size), k, seed

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None) -> list[list[int]]:
        """Algorithm 1; the batches are then taken in random order."""
        if neighbours is None or len(neighbours) != len(segments):
            raise ValueError("BM25 batching needs the neighbours of every segment: run stage pack")
        random = generator(self.seed, epoch)
        return shuffled(chunks(chain(neighbours, random), self.size), random)


def chain(neighbours: np.ndarray, random: np.random.Generator) -> list[int]:
    """Algorithm 1: from a segment to its most similar unused one, from a random unused one where none is left."""
    starts = iter(random.permutation(len(neighbours)).tolist())
    lists = neighbours.tolist()
    used = [False] * len(lists)
    order: list[int] = []
    current: int | None = None
    while len(order) < len(lists):
        if current is None:
            current = next(start for start in starts if not used[start])
        order.append(current)
        used[current] = True
        current = next((other for other in lists[current] if other >= 0 and not used[other]), None)
    return order
