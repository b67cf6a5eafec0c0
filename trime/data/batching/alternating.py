"""Alternate between batches of consecutive segments and of BM25 neighbours, to train with all memories at once."""

from __future__ import annotations

from itertools import chain as chain_lists
from itertools import zip_longest

import numpy as np

from trime.data.batching.base import chunks, generator, shuffled
from trime.data.batching.bm25 import greedy_chain, neighbour_lists
from trime.data.batching.consecutive import Consecutive
from trime.data.segments import Segments


class Alternating:
    """Batches of ``size``: runs of ``run`` segments (see consecutive), then a chain over ``k`` neighbours (see bm25)."""

    needs_neighbours = True
    contiguous_rows = False

    def __init__(self, size: int, run: int, k: int, seed: int):
        self.consecutive = Consecutive(size, run, seed)
        self.size, self.k, self.seed = size, k, seed

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None) -> list[list[int]]:
        """Plan half of the segments in consecutive batches, a new half in each epoch, and the others by Algorithm 1."""
        random, lists = generator(self.seed, epoch), neighbour_lists(neighbours, len(segments), False)
        consecutive = self.consecutive.plan(segments, epoch)
        half = (len(consecutive) + 1) // 2
        others = np.array([number for batch in consecutive[half:] for number in batch], dtype=int)
        chained = shuffled(chunks(greedy_chain(lists, random.permutation(others).tolist()), self.size), random)
        alternating = chain_lists.from_iterable(zip_longest(consecutive[:half], chained))
        return [batch for batch in alternating if batch is not None]
