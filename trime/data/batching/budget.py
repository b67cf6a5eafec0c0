"""Batches of sentences that hold about as many pieces, padding counted: of like length, or along chains of BM25 neighbours."""

from __future__ import annotations

import numpy as np

from trime.data.batching.base import check_size, generator, shuffled
from trime.data.batching.bm25 import chain, lists_of
from trime.data.segments import Segments


class Budget:
    """As many sentences as fill ``tokens`` pieces, the longest one's length for each, and at most ``size``.

    ``k`` null: shuffled, then sorted by length; else chains of TRIME's Algorithm 1 over ``k`` neighbours, cut where
    a batch is full. The batches are then taken in random order.
    """

    reads_on = False

    def __init__(self, tokens: int, k: int | None, seed: int, size: int | None = None):
        if tokens < 1 or (k is not None and k < 1):
            raise ValueError(f"batching.tokens={tokens}, batching.k={k}: a batch holds pieces, and k neighbours at least 1")
        self.tokens, self.k, self.seed = tokens, k, seed
        self.needs_neighbours, self.size = k is not None, check_size(tokens if size is None else size)

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None) -> list[list[int]]:
        """Every sentence once."""
        random = generator(self.seed, epoch)
        order = random.permutation(len(segments)).tolist()
        if self.k is None:
            order.sort(key=segments.length.__getitem__)
        else:
            order = chain(lists_of(neighbours, len(segments), False), order)
        return shuffled(filled(order, segments.length, self.tokens, self.size), random)


def filled(order: list[int], length: np.ndarray, tokens: int, size: int) -> list[list[int]]:
    """Consecutive sentences, as many as fit; one that is too long alone is a batch of its own."""
    batches: list[list[int]] = []
    longest = 0
    for number in order:
        longest = max(longest, int(length[number]))
        if not batches or len(batches[-1]) == size or longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = int(length[number])
        batches[-1].append(number)
    return batches
