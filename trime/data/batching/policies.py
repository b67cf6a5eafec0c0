"""The interface of batching policies, those of TRIME section 4 (shuffled, consecutive, BM25, alternating), contiguous rows."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from trime.data.segments import Segments

T = TypeVar("T")
NO_SEGMENT = -1  # a row that has run out of documents


@runtime_checkable
class Batching(Protocol):
    """Plans the batches of an epoch: lists of segment numbers, each segment once, deterministic in (seed, epoch).

    -1 is a row without a segment, where every batch must have the same number of rows. ``neighbours`` is
    [segments k], the most similar first and -1 where there are fewer, or None.
    """

    size: int  # segments per batch, over all devices
    needs_neighbours: bool
    contiguous_rows: bool  # a row continues the same row of the previous batch, or starts a document

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None) -> list[list[int]]:
        """Return the batches of an epoch."""


class Shuffled:
    """Batches of ``size`` random segments: the default batching, for local memory (TRIME section 4.1, Fig. 2a)."""

    needs_neighbours, contiguous_rows = False, False

    def __init__(self, size: int, seed: int):
        self.size, self.seed = check_size(size), seed

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None = None) -> list[list[int]]:
        return chunks(generator(self.seed, epoch).permutation(len(segments)).tolist(), self.size)


class Consecutive:
    """Batches of ``size`` segments in runs of ``run`` (the paper's m) consecutive ones of a document, oldest first.

    For long-term memory (TRIME section 4.2, Fig. 2b).
    """

    needs_neighbours, contiguous_rows = False, False

    def __init__(self, size: int, run: int, seed: int):
        self.size, self.run, self.seed = check_size(size), run, seed
        if not 1 <= run <= size:
            raise ValueError(f"batching.run={run} must lie in 1..batching.size={size}")

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None = None) -> list[list[int]]:
        """Fill batches with full runs in random order, then with the shorter runs that remain of documents."""
        random = generator(self.seed, epoch)
        runs = []
        for document in np.split(np.arange(len(segments)), np.flatnonzero(np.diff(segments.document)) + 1):
            # A document shorter than whole runs starts with its short one in every other epoch.
            first = len(document) % self.run if epoch % 2 else 0
            runs += [r for r in (document[:first].tolist(), *chunks(document[first:].tolist(), self.run)) if r]
        # Short runs come last: only after them, or with a size that is no multiple of a run, does a run cross batches.
        full, short = ([r for r in runs if (len(r) == self.run) == is_full] for is_full in (True, False))
        order = [segment for run in (*shuffle(full, random), *shuffle(short, random)) for segment in run]
        return shuffle(chunks(order, self.size), random)


class BM25:
    """Batches of ``size`` segments along a greedy chain of BM25 neighbours, for external memory.

    Algorithm 1 of TRIME, section 4.3; ``k`` is SimSeg's k. conf/neighbours selects the search engine (see
    trime.data.neighbours). ``string_ids`` is the published code's quirk: it looks for numbers among strings, finds no
    neighbours, and so gives a plain shuffle.
    """

    needs_neighbours, contiguous_rows = True, False

    def __init__(self, size: int, k: int, seed: int, string_ids: bool = False):
        self.size, self.k, self.seed, self.string_ids = check_size(size), k, seed, string_ids

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None) -> list[list[int]]:
        random, lists = generator(self.seed, epoch), neighbour_lists(neighbours, len(segments), self.string_ids)
        order = greedy_chain(lists, random.permutation(len(lists)).tolist())
        return shuffle(chunks(order, self.size), random)


class Alternating:
    """In turn a batch of runs of ``run`` segments (see Consecutive) and one of BM25 neighbours, to train with all memories."""

    needs_neighbours, contiguous_rows = True, False

    def __init__(self, size: int, run: int, k: int, seed: int):
        self.consecutive = Consecutive(size, run, seed)
        self.size, self.k, self.seed = size, k, seed

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None) -> list[list[int]]:
        """Put half of the segments into consecutive batches, a new half in each epoch, and order the others by Algorithm 1."""
        random, lists = generator(self.seed, epoch), neighbour_lists(neighbours, len(segments))
        consecutive = self.consecutive.plan(segments, epoch)
        half = (len(consecutive) + 1) // 2
        others = np.array([number for batch in consecutive[half:] for number in batch], dtype=int)
        chained = shuffle(chunks(greedy_chain(lists, random.permutation(others).tolist()), self.size), random)
        alternating = chain.from_iterable(zip_longest(consecutive[:half], chained))
        return [batch for batch in alternating if batch is not None]


class Streams:
    """Batches of ``size`` rows, each with the next segment of its own documents: states are carried on (Wu et al. 2022)."""

    needs_neighbours, contiguous_rows = False, True

    def __init__(self, size: int, seed: int):
        self.size, self.seed = check_size(size), seed

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None = None) -> list[list[int]]:
        """Return batches of exactly ``size`` rows; -1 where a row has no segments left."""
        random = generator(self.seed, epoch)
        share = -(-len(segments) // self.size)
        documents = np.split(np.arange(len(segments)), np.flatnonzero(np.diff(segments.document)) + 1)
        # A document longer than a row's share is split, so that a text of one document fills all rows too.
        pieces = [piece for document in documents for piece in np.array_split(document, -(-len(document) // share))]
        pieces = [pieces[i] for i in random.permutation(len(pieces))]
        rows: list[list[np.ndarray]] = [[] for _ in range(self.size)]
        load = np.zeros(self.size, np.int64)
        # The longest first, each to the row with the fewest segments, so that rows end together.
        for piece in sorted(pieces, key=len, reverse=True):
            row = int(load.argmin())
            rows[row].append(piece)
            load[row] += len(piece)
        # Rows end at different steps: the shorter ones are filled with rows of padding.
        batches = np.full((int(load.max()), self.size), NO_SEGMENT)
        for row, assigned in zip(random.permutation(self.size), rows, strict=True):
            order = [segment for i in random.permutation(len(assigned)) for segment in assigned[i]]
            batches[: len(order), row] = order
        return batches.tolist()


def neighbour_lists(neighbours: np.ndarray | None, segments: int, string_ids: bool = False) -> list[list[int]]:
    """Return the neighbours of each segment; none with ``string_ids``. ValueError where they were not computed."""
    if neighbours is None or len(neighbours) != segments:
        raise ValueError("BM25 batching needs the neighbours of every segment: run stage pack")
    return [[] for _ in range(segments)] if string_ids else neighbours.tolist()


def greedy_chain(lists: list[list[int]], order_of_starts: list[int]) -> list[int]:
    """Order some segments by Algorithm 1: after each its most similar unused one, or the next unused start if there is none."""
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


def generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng([seed, epoch])


def chunks(order: list[T], size: int) -> list[list[T]]:
    """Split a list into consecutive lists of ``size``; the last one may be shorter."""
    return [order[start : start + size] for start in range(0, len(order), size)]


def shuffle(batches: list[list[int]], random: np.random.Generator) -> list[list[int]]:
    return [batches[i] for i in random.permutation(len(batches))]


def check_size(size: int) -> int:
    """Return the size of a batch; ValueError where it is below 1."""
    if size < 1:
        raise ValueError(f"batching.size={size}: a batch holds at least one segment")
    return size
