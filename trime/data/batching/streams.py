"""Contiguous rows: each reads documents of its own in order, segment by segment (Wu et al. 2022, Figure 3)."""

from __future__ import annotations

import numpy as np

from trime.data.batching.base import check_size, generator
from trime.data.segments import Segments

NO_SEGMENT = -1  # a row that has run out of documents


class Streams:
    """Batches of ``size`` rows that hold the next segment of each row, so that a state can be carried from batch to batch.

    The longest documents are assigned first, each to the row with the fewest segments, so that rows end together;
    a row then reads its documents in random order. A document longer than a row's share of the text is split into
    parts that are read like documents, so that a text of one document fills all rows too.
    """

    needs_neighbours = False
    contiguous_rows = True

    def __init__(self, size: int, seed: int):
        self.size, self.seed = check_size(size), seed

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None = None) -> list[list[int]]:
        """Plan batches of exactly ``size`` rows; -1 where a row has no segments left."""
        random = generator(self.seed, epoch)
        share = -(-len(segments) // self.size)
        documents = np.split(np.arange(len(segments)), np.flatnonzero(np.diff(segments.document)) + 1)
        parts = [part for document in documents for part in np.array_split(document, -(-len(document) // share))]
        documents = [parts[i] for i in random.permutation(len(parts))]
        rows: list[list[np.ndarray]] = [[] for _ in range(self.size)]
        load = np.zeros(self.size, np.int64)
        for document in sorted(documents, key=len, reverse=True):
            row = int(load.argmin())
            rows[row].append(document)
            load[row] += len(document)
        plan = np.full((int(load.max()), self.size), NO_SEGMENT)
        for row, assigned in zip(random.permutation(self.size), rows, strict=True):
            order = [segment for i in random.permutation(len(assigned)) for segment in assigned[i]]
            plan[: len(order), row] = order
        return plan.tolist()
