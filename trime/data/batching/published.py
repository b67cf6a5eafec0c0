"""Batches in exactly the order of the published trainer (fairseq's iterators), for exact comparisons."""

from __future__ import annotations

import random
from itertools import chain as chain_lists
from itertools import zip_longest

import numpy as np

from trime.data.batching.base import check_size, chunks
from trime.data.batching.bm25 import greedy_chain, neighbour_lists
from trime.data.batching.budget import fill_batches
from trime.data.segments import Segments

ORDERS = ("shuffled", "kept", "bm25")


class Published:
    """Steps of the published trainer: ``size`` segments in equal parts over its ``processes``.

    ``order=shuffled``: segments sorted by length, ties in random order; greedy batches, shuffled every epoch and dealt
    to the processes in turn. ``kept``: the order of the text, never shuffled; every group of ``combined`` processes
    reads a contiguous part of it, so that they hold consecutive batches. ``bm25``: the published chain, whose batches
    are shuffled in groups of ``processes``. ``multiple``: batches hold a multiple of so many segments. ``joined``: the
    batches of all processes at a step are one micro-batch, so that memories are gathered over them; otherwise each
    process's batch is a micro-batch of its own.
    """

    contiguous_rows = False

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
        """Return the micro-batches of an epoch: the batches of all ranks at each step, joined or one by one."""
        order = self.segment_order(segments.length, neighbours)
        shards = self.distribute(self.batches(order, segments.length), epoch + 1)
        steps = zip_longest(*shards, fillvalue=())
        if self.joined:
            return [list(chain_lists.from_iterable(step)) for step in steps]
        return [list(batch) for step in steps for batch in step]

    def segment_order(self, lengths: np.ndarray, neighbours: np.ndarray | None) -> list[int]:
        """Return the segments in the order in which they are put into batches."""
        if self.order == "kept":
            return list(range(len(lengths)))
        if self.order == "shuffled":
            permutation = np.random.RandomState(self.seed).permutation(len(lengths))
            return np.lexsort((permutation, lengths)).tolist()
        nearest = None if neighbours is None else neighbours[:, : self.k]
        return published_chain(neighbour_lists(nearest, len(lengths), self.string_ids), self.seed)

    def batches(self, order: list[int], lengths: np.ndarray) -> list[list[int]]:
        """Fill batches greedily up to the tokens of a process's segments at their maximum length."""
        capacity = self.size // self.processes * int(lengths.max())
        return fill_batches(order, lengths, capacity, len(order), multiple=self.multiple)

    def distribute(self, batches: list[list[int]], epoch: int) -> list[list[list[int]]]:
        """Return each process's batches of an epoch, which the published code counts from 1."""
        if self.order == "kept":
            groups = self.processes // self.combined
            size = -(-len(batches) // groups)
            parts = [batches[start : start + size] for start in range(0, size * groups, size)]
            return [part[c :: self.combined] for part in parts for c in range(self.combined)]
        size = self.processes if self.order == "bm25" else 1
        shuffled_groups = chunks(batches, size)
        np.random.RandomState(self.seed + epoch).shuffle(shuffled_groups)
        flat = [batch for group in shuffled_groups for batch in group]
        return [flat[rank :: self.processes] for rank in range(self.processes)]


def published_chain(lists: list[list[int]], seed: int) -> list[int]:
    """Order segments by Algorithm 1 with starts shuffled by Python's generator; ``lists`` exclude the segment itself."""
    starts = list(range(len(lists)))
    random.Random(seed).shuffle(starts)
    return greedy_chain(lists, starts)
