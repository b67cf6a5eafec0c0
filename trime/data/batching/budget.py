"""Batches of sentences with about the same number of pieces: of similar length, or along chains of BM25 neighbours."""

from __future__ import annotations

import numpy as np

from trime.data.batching.base import check_size, chunks, generator, shuffled
from trime.data.batching.bm25 import greedy_chain, neighbour_lists
from trime.data.segments import Segments


class Budget:
    """Batches of up to ``tokens`` pieces and ``size`` sentences, of which ``processes`` together make one batch.

    With ``padding`` every sentence counts as long as the longest one, so that ``tokens`` bounds memory and time. Otherwise
    ``tokens`` are pieces of each pair's longer side, so that batches of mixed lengths hold as many pieces as those of one
    length, and are larger. With ``k`` None sentences are shuffled, then sorted by length; otherwise they follow chains of
    TRIME's Algorithm 1 over ``k`` neighbours, cut where a batch is full. The batches are then shuffled. A batch holds a
    multiple of ``multiple`` sentences and leaves the rest to the next one.

    ``processes`` is the number of devices of the published run: its trainer gives each a batch of ``tokens`` at every
    step, consecutive ones of a chain, so that all devices' memories are neighbours (fairseq's --max-tokens and
    --predefined-batches).
    """

    contiguous_rows = False

    def __init__(
        self,
        tokens: int,
        k: int | None,
        seed: int,
        size: int | None = None,
        padding: bool = True,
        processes: int = 1,
        multiple: int = 1,
    ):
        if tokens < 1 or (k is not None and k < 1):
            raise ValueError(f"batching.tokens={tokens}, batching.k={k}: a batch holds pieces, and k neighbours at least 1")
        if processes < 1 or multiple < 1:
            raise ValueError(f"batching.processes={processes}, batching.multiple={multiple}: each is at least 1")
        self.processes, self.multiple = processes, multiple
        self.tokens, self.k, self.seed, self.padding = tokens, k, seed, padding
        self.needs_neighbours, self.size = k is not None, check_size(tokens if size is None else size)

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None) -> list[list[int]]:
        """Plan batches that hold every sentence once."""
        random = generator(self.seed, epoch)
        order = random.permutation(len(segments)).tolist()
        if self.k is None:
            order.sort(key=segments.length.__getitem__)
        else:
            order = greedy_chain(neighbour_lists(neighbours, len(segments), False), order)
        batches = fill_batches(order, segments.length, self.tokens, self.size, self.padding, self.multiple)
        if self.k is None:
            return merge_batches(shuffled(batches, random), self.processes)
        return shuffled(merge_batches(batches, self.processes), random)


def merge_batches(batches: list[list[int]], processes: int) -> list[list[int]]:
    """Merge every ``processes`` consecutive batches into one; the last may be of fewer."""
    return [[number for batch in group for number in batch] for group in chunks(batches, processes)]


def fill_batches(
    order: list[int], length: np.ndarray, tokens: int, size: int, padding: bool = True, multiple: int = 1
) -> list[list[int]]:
    """Fill batches with consecutive sentences; a sentence that is too long by itself is a batch of its own."""
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = pieces = 0
    for number in order:
        added = int(length[number])
        total = max(longest, added) * (len(batch) + 1) if padding else pieces + added
        if batch and (len(batch) == size or total > tokens):
            count = max(len(batch) // multiple * multiple, len(batch) % multiple)
            batches.append(batch[:count])
            batch = batch[count:]
            longest, pieces = max(map(int, length[batch]), default=0), int(length[batch].sum())
        batch.append(number)
        longest, pieces = max(longest, added), pieces + added
    return [*batches, batch] if batch else batches
