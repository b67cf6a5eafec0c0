"""Segments with large lexical overlap in one batch, for external memory (TRIME section 4.3, Algorithm 1)."""

from __future__ import annotations

import numpy as np

from trime.data.batching.base import check_size, chunks, generator, shuffled
from trime.data.segments import Segments


class BM25:
    """``size`` segments a batch along a greedy chain of BM25 neighbours; ``k`` is SimSeg's k.

    conf/neighbours chooses what finds them (see trime.data.neighbours). ``string_ids`` is the published
    code's quirk: it looks for numbers among strings, finds no neighbour, and leaves a plain shuffle.
    """

    needs_neighbours = True
    reads_on = False

    def __init__(self, size: int, k: int, seed: int, string_ids: bool = False):
        self.size, self.k, self.seed, self.string_ids = check_size(size), k, seed, string_ids

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None) -> list[list[int]]:
        """Algorithm 1; the batches are then taken in random order."""
        random, lists = generator(self.seed, epoch), lists_of(neighbours, len(segments), self.string_ids)
        order = chain(lists, random.permutation(len(lists)).tolist())
        return shuffled(chunks(order, self.size), random)


def lists_of(neighbours: np.ndarray | None, segments: int, string_ids: bool) -> list[list[int]]:
    """The neighbours of each segment; none where the published code looks for numbers among strings."""
    if neighbours is None or len(neighbours) != segments:
        raise ValueError("BM25 batching needs the neighbours of every segment: run stage pack")
    return [[] for _ in range(segments)] if string_ids else neighbours.tolist()


def chain(lists: list[list[int]], order_of_starts: list[int]) -> list[int]:
    """Algorithm 1: from a segment to its most similar unused one, from the next unused start where none is left.

    The segments are those of ``order_of_starts``: all, or some of them.
    """
    starts = iter(order_of_starts)
    used = [True] * len(lists)
    for start in order_of_starts:
        used[start] = False
    order: list[int] = []
    current: int | None = None
    while len(order) < len(order_of_starts):
        if current is None:
            current = next(start for start in starts if not used[start])
        order.append(current)
        used[current] = True
        current = next((other for other in lists[current] if other >= 0 and not used[other]), None)
    return order
