"""What a batching is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from trime.data.segments import Segments


@runtime_checkable
class Batching(Protocol):
    """Plans the batches of an epoch: lists of segment numbers, each segment once, deterministic in (seed, epoch).

    -1 is a row without a segment, where every batch must have as many rows.

    ``neighbours`` is [segments k], the most similar first and -1 where there are fewer, or None.
    """

    size: int  # segments a batch, over all devices
    needs_neighbours: bool
    reads_on: bool  # a row goes on where the same row of the last batch ended, or starts a document

    def plan(self, segments: Segments, epoch: int, neighbours: np.ndarray | None) -> list[list[int]]: ...


def generator(seed: int, epoch: int) -> np.random.Generator:
    """The random state of an epoch."""
    return np.random.default_rng([seed, epoch])


def chunks(order: list[int], size: int) -> list[list[int]]:
    """Consecutive lists of ``size``, the last one maybe shorter."""
    return [order[start : start + size] for start in range(0, len(order), size)]


def shuffled(batches: list[list[int]], random: np.random.Generator) -> list[list[int]]:
    """The batches in random order."""
    return [batches[i] for i in random.permutation(len(batches))]


def check_size(size: int) -> int:
    if size < 1:
        raise ValueError(f"batching.size={size}: a batch holds at least one segment")
    return size
