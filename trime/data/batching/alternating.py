"""Batches of consecutive segments and of BM25 neighbours in turn, for every memory at once."""

from __future__ import annotations

from itertools import chain as chain_lists
from itertools import zip_longest

import numpy as np

from trime.data.batching.base import chunks, generator, shuffled
from trime.data.batching.bm25 import chain, lists_of
from trime.data.batching.consecutive import Consecutive
from trime.data.segments import Segments


class Alternating:
    """``size`` segments a batch: ``run`` consecutive ones (see consecutive), then a chain over ``k`` neighbours (see bm25)."""

    needs_neighbours = True
    reads_on = False

    def __init__(self, size: int, run: int, k: int, seed: int):
        self.consecutive = Consecutive(size, run, seed)
        self.size, self.k, self.seed = size, k, seed

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None) -> list[list[int]]:
        """Half of the consecutive batches, drawn anew in each epoch, and the other half's segments by Algorithm 1."""
        random, lists = generator(self.seed, epoch), lists_of(neighbours, len(segments), False)
        consecutive = self.consecutive.plan(segments, epoch)
        kept = (len(consecutive) + 1) // 2
        others = np.array([number for batch in consecutive[kept:] for number in batch], dtype=int)
        chained = shuffled(chunks(chain(lists, random.permutation(others).tolist()), self.size), random)
        turns = chain_lists.from_iterable(zip_longest(consecutive[:kept], chained))
        return [batch for batch in turns if batch is not None]
