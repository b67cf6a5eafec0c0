"""Batches of sentences that hold about as many pieces: of like length, or along chains of BM25 neighbours."""

from __future__ import annotations

import numpy as np

from trime.data.batching.base import check_size, generator, shuffled
from trime.data.batching.bm25 import chain, lists_of
from trime.data.segments import Segments


class Budget:
    """As many sentences as fill ``tokens`` pieces, and at most ``size``; ``processes`` such batches side by side are one.

    ``padding`` counts: each sentence as long as the longest one, so that ``tokens`` bounds memory and time. Else ``tokens`` are
    pieces of each pair's longer side, which makes batches of mixed lengths as rich as those of one length, and larger.
    ``k`` null: shuffled, then sorted by length; else chains of TRIME's Algorithm 1 over ``k`` neighbours, cut where
    a batch is full. The batches are then taken in random order. ``multiple``: a batch holds a multiple of so many sentences,
    and leaves the rest to the next one.

    ``processes`` is the number of devices that the published run had: its trainer gives each a batch of ``tokens`` at every
    step, those of a chain one after the other, so that the memories of all are of neighbours (fairseq's --max-tokens and
    --predefined-batches).
    """

    reads_on = False

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
        """Every sentence once."""
        random = generator(self.seed, epoch)
        order = random.permutation(len(segments)).tolist()
        if self.k is None:
            order.sort(key=segments.length.__getitem__)
        else:
            order = chain(lists_of(neighbours, len(segments), False), order)
        batches = filled(order, segments.length, self.tokens, self.size, self.padding, self.multiple)
        if self.k is None:
            return side_by_side(shuffled(batches, random), self.processes)
        return shuffled(side_by_side(batches, self.processes), random)


def side_by_side(batches: list[list[int]], processes: int) -> list[list[int]]:
    """Join every ``processes`` consecutive batches to one; the last may be of fewer."""
    groups = (batches[start : start + processes] for start in range(0, len(batches), processes))
    return [[number for batch in group for number in batch] for group in groups]


def filled(
    order: list[int], length: np.ndarray, tokens: int, size: int, padding: bool = True, multiple: int = 1
) -> list[list[int]]:
    """Consecutive sentences, as many as fit; one that is too long alone is a batch of its own."""
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = pieces = 0
    for number in order:
        own = int(length[number])
        held = max(longest, own) * (len(batch) + 1) if padding else pieces + own
        if batch and (len(batch) == size or held > tokens):
            kept = max(len(batch) // multiple * multiple, len(batch) % multiple)
            batches.append(batch[:kept])
            batch = batch[kept:]
            longest, pieces = max(map(int, length[batch]), default=0), int(length[batch].sum())
        batch.append(number)
        longest, pieces = max(longest, own), pieces + own
    return [*batches, batch] if batch else batches
