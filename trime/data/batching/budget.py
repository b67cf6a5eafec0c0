"""Batches of sentences that hold about as many pieces: of like length, or along chains of BM25 neighbours."""

from __future__ import annotations

import numpy as np

from trime.data.batching.base import check_size, generator, shuffled
from trime.data.batching.bm25 import chain, lists_of
from trime.data.segments import Segments


class Budget:
    """As many sentences as fill ``tokens`` pieces, and at most ``size``.

    ``padding`` counts: each sentence as long as the longest one, so that ``tokens`` bounds memory and time. Else ``tokens`` are
    pieces of each pair's longer side, which makes batches of mixed lengths as rich as those of one length, and larger.
    ``k`` null: shuffled, then sorted by length; else chains of TRIME's Algorithm 1 over ``k`` neighbours, cut where
    a batch is full. The batches are then taken in random order.
    """

    reads_on = False

    def __init__(self, tokens: int, k: int | None, seed: int, size: int | None = None, padding: bool = True):
        if tokens < 1 or (k is not None and k < 1):
            raise ValueError(f"batching.tokens={tokens}, batching.k={k}: a batch holds pieces, and k neighbours at least 1")
        self.tokens, self.k, self.seed, self.padding = tokens, k, seed, padding
        self.needs_neighbours, self.size = k is not None, check_size(tokens if size is None else size)

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None) -> list[list[int]]:
        """Every sentence once."""
        random = generator(self.seed, epoch)
        order = random.permutation(len(segments)).tolist()
        if self.k is None:
            order.sort(key=segments.length.__getitem__)
        else:
            order = chain(lists_of(neighbours, len(segments), False), order)
        return shuffled(filled(order, segments.length, self.tokens, self.size, self.padding), random)


def filled(order: list[int], length: np.ndarray, tokens: int, size: int, padding: bool = True) -> list[list[int]]:
    """Consecutive sentences, as many as fit; one that is too long alone is a batch of its own."""
    batches: list[list[int]] = []
    longest = pieces = 0
    for number in order:
        longest, pieces = max(longest, int(length[number])), pieces + int(length[number])
        held = longest * (len(batches[-1]) + 1) if batches and padding else pieces
        if not batches or len(batches[-1]) == size or held > tokens:
            batches.append([])
            longest = pieces = int(length[number])
        batches[-1].append(number)
    return batches
