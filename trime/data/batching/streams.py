"""Rows that read on: each reads documents of its own in order, segment after segment (Wu et al. 2022, Figure 3)."""

from __future__ import annotations

import numpy as np

from trime.data.batching.base import check_size, generator
from trime.data.segments import Segments

NOTHING = -1  # a row that has run out of documents


class Streams:
    """``size`` rows; every batch holds the next segment of each, so that a state can be carried from batch to batch.

    The longest documents are dealt first, each to the row with the least to read, so that rows end together;
    a row then reads its documents in random order. A document longer than a row's share of the text is cut into
    parts, which are read like documents: so a text that is one document fills all rows too.
    """

    needs_neighbours = False
    reads_on = True

    def __init__(self, size: int, seed: int):
        self.size, self.seed = check_size(size), seed

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None = None) -> list[list[int]]:
        """Batches of exactly ``size`` rows; -1 where a row has nothing left."""
        random = generator(self.seed, epoch)
        whole, share = np.arange(len(segments)), -(-len(segments) // self.size)
        documents = np.split(whole, np.flatnonzero(np.diff(segments.document)) + 1)
        parts = [part for document in documents for part in np.array_split(document, -(-len(document) // share))]
        documents = [parts[i] for i in random.permutation(len(parts))]
        rows: list[list[np.ndarray]] = [[] for _ in range(self.size)]
        load = np.zeros(self.size, np.int64)
        for document in sorted(documents, key=len, reverse=True):
            row = int(load.argmin())
            rows[row].append(document)
            load[row] += len(document)
        plan = np.full((int(load.max()), self.size), NOTHING)
        for row, own in zip(random.permutation(self.size), rows, strict=True):
            order = [segment for i in random.permutation(len(own)) for segment in own[i]]
            plan[: len(order), row] = order
        return plan.tolist()
