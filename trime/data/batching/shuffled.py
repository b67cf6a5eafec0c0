"""Segments in random order: the default batching, for local memory (TRIME section 4.1, Fig. 2a)."""

from __future__ import annotations

import numpy as np

from trime.data.batching.base import check_size, chunks, generator
from trime.data.segments import Segments


class Shuffled:
    """Batches of ``size`` random segments."""

    needs_neighbours = False
    contiguous_rows = False

    def __init__(self, size: int, seed: int):
        self.size, self.seed = check_size(size), seed

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None = None) -> list[list[int]]:
        """Split a random permutation into batches."""
        return chunks(generator(self.seed, epoch).permutation(len(segments)).tolist(), self.size)
