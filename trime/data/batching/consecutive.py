"""Runs of consecutive segments of a document, for long-term memory (TRIME section 4.2, Fig. 2b)."""

from __future__ import annotations

import numpy as np

from trime.data.batching.base import check_size, chunks, generator, shuffled
from trime.data.segments import Segments


class Consecutive:
    """Batches of ``size`` segments in runs of ``run`` (the paper's m) consecutive ones, oldest first."""

    needs_neighbours = False
    contiguous_rows = False

    def __init__(self, size: int, run: int, seed: int):
        self.size, self.run, self.seed = check_size(size), run, seed
        if not 1 <= run <= size:
            raise ValueError(f"batching.run={run} must lie in 1..batching.size={size}")

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None = None) -> list[list[int]]:
        """Fill batches with full runs in random order, then with the shorter runs that remain of documents.

        A run is continued in the next batch where its batch is full, which only happens after short runs or with a
        ``size`` that is not a multiple of ``run``.
        """
        random = generator(self.seed, epoch)
        runs = []
        for document in np.split(np.arange(len(segments)), np.flatnonzero(np.diff(segments.document)) + 1):
            # A document shorter than whole runs starts with its short one in every other epoch.
            first = len(document) % self.run if epoch % 2 else 0
            runs += [r for r in (document[:first].tolist(), *chunks(document[first:].tolist(), self.run)) if r]
        full, short = ([r for r in runs if (len(r) == self.run) == is_full] for is_full in (True, False))
        order = [segment for run in (*shuffled(full, random), *shuffled(short, random)) for segment in run]
        return shuffled(chunks(order, self.size), random)
