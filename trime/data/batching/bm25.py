"""Segments with large lexical overlap in one batch, for external memory (TRIME section 4.3, Algorithm 1)."""

from __future__ import annotations

import numpy as np

from trime.data.batching.base import check_size, chunks, generator, shuffled
from trime.data.segments import Segments


class BM25:
    """Batches of ``size`` segments along a greedy chain of BM25 neighbours; ``k`` is SimSeg's k.

    conf/neighbours selects the search engine (see trime.data.neighbours). ``string_ids`` is the published code's
    quirk: it looks for numbers among strings, finds no neighbours, and so gives a plain shuffle.
    """

    needs_neighbours = True
    contiguous_rows = False

    def __init__(self, size: int, k: int, seed: int, string_ids: bool = False):
        self.size, self.k, self.seed, self.string_ids = check_size(size), k, seed, string_ids

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None) -> list[list[int]]:
        """Plan by Algorithm 1, then shuffle the batches."""
        random, lists = generator(self.seed, epoch), neighbour_lists(neighbours, len(segments), self.string_ids)
        order = greedy_chain(lists, random.permutation(len(lists)).tolist())
        return shuffled(chunks(order, self.size), random)


def neighbour_lists(neighbours: np.ndarray | None, segments: int, string_ids: bool) -> list[list[int]]:
    """Return the neighbours of each segment; none with ``string_ids``. ValueError where they were not computed."""
    if neighbours is None or len(neighbours) != segments:
        raise ValueError("BM25 batching needs the neighbours of every segment: run stage pack")
    return [[] for _ in range(segments)] if string_ids else neighbours.tolist()


def greedy_chain(lists: list[list[int]], order_of_starts: list[int]) -> list[int]:
    """Order segments by Algorithm 1: after each its most similar unused one, or the next unused start if there is none.

    ``order_of_starts`` holds the segments to order: all, or some of them.
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
