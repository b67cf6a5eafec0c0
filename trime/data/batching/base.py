"""The interface of batching policies, and their helpers."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from trime.data.segments import Segments

T = TypeVar("T")


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


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Return the random generator of an epoch."""
    return np.random.default_rng([seed, epoch])


def chunks(order: list[T], size: int) -> list[list[T]]:
    """Split a list into consecutive lists of ``size``; the last one may be shorter."""
    return [order[start : start + size] for start in range(0, len(order), size)]


def shuffled(batches: list[list[int]], random: np.random.Generator) -> list[list[int]]:
    """Return the batches in random order."""
    return [batches[i] for i in random.permutation(len(batches))]


def check_size(size: int) -> int:
    """Return the size of a batch; ValueError where it is below 1."""
    if size < 1:
        raise ValueError(f"batching.size={size}: a batch holds at least one segment")
    return size
