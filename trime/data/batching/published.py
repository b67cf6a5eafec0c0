"""Batches as fairseq makes them: by a budget of tokens, or in exactly the order of the published trainer's iterators."""

from __future__ import annotations

import random
from itertools import chain, zip_longest

import numpy as np

from trime.data.batching.policies import check_size, chunks, generator, greedy_chain, neighbour_lists, shuffle
from trime.data.segments import Segments

ORDERS = ("shuffled", "kept", "bm25")


class Budget:
    """Batches of up to ``tokens`` pieces and ``size`` sentences; ``processes`` of them are merged into one batch.

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
        random = generator(self.seed, epoch)
        # The shuffle comes first: a stable sort then leaves sentences of one length in random order.
        order = random.permutation(len(segments)).tolist()
        if self.k is None:
            order.sort(key=segments.length.__getitem__)
        else:
            order = greedy_chain(neighbour_lists(neighbours, len(segments)), order)
        batches = fill_batches(order, segments.length, self.tokens, self.size, self.padding, self.multiple)
        if self.k is None:
            batches = shuffle(batches, random)
        merged = [list(chain.from_iterable(group)) for group in chunks(batches, self.processes)]
        return merged if self.k is None else shuffle(merged, random)


class Published:
    """Steps of the published trainer, for exact comparisons: ``size`` segments, shared equally by its ``processes``.

    ``order=shuffled``: segments sorted by length, ties in random order; greedy batches, shuffled every epoch and dealt
    to the processes in turn. ``kept``: the order of the text, never shuffled; every group of ``combined`` processes
    reads a contiguous section of it, so that they hold consecutive batches. ``bm25``: the published chain, whose batches
    are shuffled in groups of ``processes``. ``multiple``: the number of segments in a batch is a multiple of this. ``joined``:
    the batches of all processes at a step are one micro-batch, so that memories are gathered over them; otherwise each
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
        batches = self.batches(self.segment_order(segments.length, neighbours), segments.length)
        steps = zip_longest(*self.distribute(batches, epoch + 1), fillvalue=())  # the published code counts epochs from 1
        if self.joined:
            return [list(chain.from_iterable(step)) for step in steps]
        return [list(batch) for step in steps for batch in step]

    def segment_order(self, lengths: np.ndarray, neighbours: np.ndarray | None) -> list[int]:
        """Return the segments in the order in which they are put into batches."""
        if self.order == "kept":
            return list(range(len(lengths)))
        if self.order == "shuffled":
            # The published trainer sorts by length, ties by this permutation, once for all epochs.
            permutation = np.random.RandomState(self.seed).permutation(len(lengths))
            return np.lexsort((permutation, lengths)).tolist()
        nearest = None if neighbours is None else neighbours[:, : self.k]
        return published_chain(neighbour_lists(nearest, len(lengths), self.string_ids), self.seed)

    def batches(self, order: list[int], lengths: np.ndarray) -> list[list[int]]:
        """Fill batches greedily up to the tokens of a process's segments at their maximum length."""
        capacity = self.size // self.processes * int(lengths.max())
        return fill_batches(order, lengths, capacity, len(order), multiple=self.multiple)

    def distribute(self, batches: list[list[int]], epoch: int) -> list[list[list[int]]]:
        if self.order == "kept":
            groups = self.processes // self.combined
            size = -(-len(batches) // groups)
            sections = [batches[start : start + size] for start in range(0, size * groups, size)]
            return [section[c :: self.combined] for section in sections for c in range(self.combined)]
        shuffled_groups = chunks(batches, self.processes if self.order == "bm25" else 1)
        np.random.RandomState(self.seed + epoch).shuffle(shuffled_groups)
        flat = [batch for group in shuffled_groups for batch in group]
        return [flat[rank :: self.processes] for rank in range(self.processes)]


def published_chain(lists: list[list[int]], seed: int) -> list[int]:
    """Order segments by Algorithm 1 with starts shuffled by Python's generator; ``lists`` exclude the segment itself."""
    starts = list(range(len(lists)))
    random.Random(seed).shuffle(starts)
    return greedy_chain(lists, starts)


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
            # Whole multiples leave; the rest opens the next batch, as fairseq's batch_by_size does.
            count = max(len(batch) // multiple * multiple, len(batch) % multiple)
            batches.append(batch[:count])
            batch = batch[count:]
            longest, pieces = max(map(int, length[batch]), default=0), int(length[batch].sum())
        batch.append(number)
        longest, pieces = max(longest, added), pieces + added
    return [*batches, batch] if batch else batches
