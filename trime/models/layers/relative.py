"""Relative positions: T5's buckets and learned bias (Raffel et al. 2020), and the causal mask of a sliding window."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from trime.types import Bool, Float, Int, Tensor


@cache
def bucket_edges(buckets: int, max_distance: int) -> list[int]:
    """Return the smallest distance of each bucket but the first: consecutive up to half of them, then logarithmic.

    Computed in integers, because floating-point logarithms put powers of two into the bucket below.
    """
    exact = buckets // 2
    coarse = buckets - exact
    edges, distance = list(range(1, exact + 1)), exact
    for step in range(1, coarse):
        while distance**coarse * exact**step < max_distance**step * exact**coarse:
            distance += 1
        edges.append(distance)
    return edges


def bucket_of(distance: Int[Tensor, "*s"], buckets: int, max_distance: int, causal: bool = True) -> Int[Tensor, "*s"]:
    """Return T5's bucket of ``distance`` = query - key.

    Causal: later keys share bucket 0 with the query itself; otherwise they have the upper half of the buckets.
    """
    if not causal:
        half = buckets // 2
        return bucket_of(distance.abs(), half, max_distance) + half * (distance < 0)
    return torch.bucketize(distance, torch.tensor(bucket_edges(buckets, max_distance), device=distance.device), right=True)


class RelativeBias(nn.Module):
    """A learned bias for every head and bucket, added to attention logits."""

    def __init__(self, heads: int, buckets: int = 32, max_distance: int = 128):
        super().__init__()
        self.buckets, self.max_distance = buckets, max_distance
        self.table = nn.Parameter(torch.zeros(heads, buckets))

    def forward(self, distance: Int[Tensor, "..."]) -> Float[Tensor, "h ..."]:
        """Return the bias of causal attention for distances query - key."""
        return self.table[:, bucket_of(distance, self.buckets, self.max_distance)]


def in_window(distance: Int[Tensor, "*s"], window: int, itself: bool) -> Bool[Tensor, "*s"]:
    """Return which keys lie in the window: the query's own position and those before it, or only those before it.

    ::

        window 3, itself      window 3, not itself
        key   0 1 2 3 4       key   0 1 2 3 4
        q 3     x x x         q 3   x x x
        q 4       x x x       q 4     x x x
    """
    first = 0 if itself else 1
    return (distance >= first) & (distance < first + window)
