"""Batches in the very order of the published trainer, for comparisons to the last digit (fairseq's iterators)."""

from __future__ import annotations

import random
from itertools import chain as chain_lists
from itertools import zip_longest

import numpy as np

from trime.data.batching.base import check_size
from trime.data.batching.bm25 import chain, lists_of
from trime.data.segments import Segments

ORDERS = ("shuffled", "kept", "bm25")


class Published:
    """``size`` segments a step of the published trainer, in equal parts over its ``processes``.

    ``order=shuffled``: short segments first, else random; greedy batches, shuffled every epoch and dealt to
    the processes in turn. ``kept``: the order of the text, never shuffled; every ``combined`` processes read
    a stretch of it side by side, so that they hold consecutive batches. ``bm25``: the published chain, whose
    batches are shuffled in groups of ``processes``. ``multiple``: batches hold a multiple of so many segments.
    ``joined``: what the processes hold at a step is one micro-batch, so that memories are gathered over them; otherwise each
    process's part is a micro-batch of its own, one after the other.
    """

    reads_on = False

    def __init__(
        self,
        size: int,
        order: str,
        seed: int,
        k: int = 20,
        processes: int = 1,
        combined: int = 1,
        multiple: int = 1,
        string_ids: bool = False,
        joined: bool = True,
    ):
        if order not in ORDERS:
            raise ValueError(f"batching.order={order}: choose one of {', '.join(ORDERS)}")
        if check_size(size) % processes or processes % combined:
            raise ValueError(
                f"batching.size={size}, processes={processes}, combined={combined}: each must be a multiple of the next"
            )
        self.size, self.order, self.seed, self.k = size, order, seed, k
        self.processes, self.combined, self.multiple, self.string_ids = processes, combined, multiple, string_ids
        self.needs_neighbours, self.joined = order == "bm25", joined

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None = None) -> list[list[int]]:
        """Return the micro-batches of an epoch: what all processes hold at each step, rank after rank, in one or apart."""
        order = self.ordered(segments.length, neighbours)
        shards = self.dealt(self.batches(order, segments.length), epoch + 1)
        steps = zip_longest(*shards, fillvalue=())
        if self.joined:
            return [list(chain_lists.from_iterable(step)) for step in steps]
        return [list(batch) for step in steps for batch in step]

    def ordered(self, lengths: np.ndarray, neighbours: np.ndarray | None) -> list[int]:
        """Segments in the order in which they are put into batches."""
        if self.order == "kept":
            return list(range(len(lengths)))
        if self.order == "shuffled":
            permutation = np.random.RandomState(self.seed).permutation(len(lengths))
            return np.lexsort((permutation, lengths)).tolist()
        nearest = None if neighbours is None else neighbours[:, : self.k]
        return published_chain(lists_of(nearest, len(lengths), self.string_ids), self.seed)

    def batches(self, order: list[int], lengths: np.ndarray) -> list[list[int]]:
        """Greedily filled up to the room of a process's full segments."""
        room = self.size // self.processes * int(lengths.max())
        found: list[list[int]] = []
        batch: list[int] = []
        for segment in order:
            if (len(batch) + 1) * int(lengths[[*batch, segment]].max()) > room:
                kept = max(len(batch) // self.multiple * self.multiple, len(batch) % self.multiple)
                found.append(batch[:kept])
                batch = batch[kept:]
            batch.append(segment)
        found.append(batch)
        return found

    def dealt(self, batches: list[list[int]], epoch: int) -> list[list[list[int]]]:
        """Each process's batches of an epoch, which the published code counts from 1."""
        if self.order == "kept":
            groups = self.processes // self.combined
            each = -(-len(batches) // groups)
            stretches = [batches[start : start + each] for start in range(0, each * groups, each)]
            return [stretch[c :: self.combined] for stretch in stretches for c in range(self.combined)]
        together = self.processes if self.order == "bm25" else 1
        groups_of = [batches[start : start + together] for start in range(0, len(batches), together)]
        np.random.RandomState(self.seed + epoch).shuffle(groups_of)
        mixed = [batch for group in groups_of for batch in group]
        return [mixed[rank :: self.processes] for rank in range(self.processes)]


def published_chain(lists: list[list[int]], seed: int) -> list[int]:
    """Algorithm 1 over lists of others only, started and restarted in the order of Python's generator."""
    starts = list(range(len(lists)))
    random.Random(seed).shuffle(starts)
    return chain(lists, starts)
