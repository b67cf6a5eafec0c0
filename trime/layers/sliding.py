"""Local attention: a sliding window over the tokens before each token, with T5's learned bias of the distance."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from trime.common.types import Bool, Float, Int, Tensor
from trime.layers.attention import fused_attention


@cache
def bucket_edges(buckets: int, max_distance: int) -> list[int]:
    """Return the smallest distance of each bucket but the first: consecutive up to half of them, then logarithmic."""
    exact = buckets // 2
    coarse = buckets - exact
    # In whole numbers: logarithms in floating point put powers of two into the bucket below.
    edges, distance = list(range(1, exact + 1)), exact
    for step in range(1, coarse):
        while distance**coarse * exact**step < max_distance**step * exact**coarse:
            distance += 1
        edges.append(distance)
    return edges


def bucket_of(distance: Int[Tensor, "*s"], buckets: int, max_distance: int, causal: bool = True) -> Int[Tensor, "*s"]:
    """Return T5's bucket of ``distance`` = query - key; later keys share bucket 0 if ``causal``, else have the upper half."""
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
    """Return the mask of the keys in the window: the query's own position and those before it, or only those before it.

    ::

        window 3, itself      window 3, not itself
        key   0 1 2 3 4       key   0 1 2 3 4
        q 3     x x x         q 3   x x x
        q 4       x x x       q 4     x x x
    """
    first = 0 if itself else 1
    return (distance >= first) & (distance < first + window)


class Cache(NamedTuple):
    """Keys and values of each row's last tokens, the newest last, detached."""

    key: Float[Tensor, "b h w d"]
    value: Float[Tensor, "b h w d"]
    filled: Bool[Tensor, "b w"]

    @staticmethod
    def empty(key: Float[Tensor, "b h l d"], window: int) -> Cache:
        zeros = key.new_zeros(*key.shape[:2], window, key.shape[3])
        return Cache(zeros, zeros, torch.zeros(len(key), window, dtype=torch.bool, device=key.device))

    def reset(self, rows: Bool[Tensor, " b"]) -> Cache:
        cleared = rows[:, None, None, None]
        return Cache(self.key.masked_fill(cleared, 0), self.value.masked_fill(cleared, 0), self.filled & ~rows[:, None])

    def append(self, key: Float[Tensor, "b h l d"], value: Float[Tensor, "b h l d"]) -> Cache:
        """Return the cache after a segment: its last tokens."""
        window = self.key.shape[2]
        pairs = ((self.key, key), (self.value, value))
        keys, values = (torch.cat([old[:, :, new.shape[2] :], new.detach()[:, :, -window:]], 2) for old, new in pairs)
        filled = self.filled.new_ones(len(key), min(key.shape[2], window))
        return Cache(keys, values, torch.cat([self.filled[:, key.shape[2] :], filled], 1))


class SlidingWindow(NamedTuple):
    """The window of local attention: ``length`` tokens, with the query's own or (``itself`` false) only those before it."""

    length: int = 512
    itself: bool = True
    empty_take_mass: bool = False  # the official code's quirk: empty slots are zero keys instead of being masked


def sliding_attention(
    query: Float[Tensor, "b h l d"],
    segment: tuple[Float[Tensor, "b h l d"], Float[Tensor, "b h l d"]],
    cache: Cache,
    bias: tuple[RelativeBias, Tensor],
    window: SlidingWindow,
    dropout: float = 0.0,
) -> Float[Tensor, "b h l d"]:
    """Return softmax(query keys + bias) values; the query is scaled already, ``bias`` a module and the scale of its output."""
    keys, values = (torch.cat([old, new], 2) for old, new in ((cache.key, segment[0]), (cache.value, segment[1])))
    filled = torch.cat([cache.filled, cache.filled.new_ones(len(query), query.shape[2])], 1)
    (module, scale), attended = bias, []
    # A block of a window's length sees two: the whole matrix would be mostly masked.
    for start in range(0, query.shape[2], window.length):
        block, visible = query[:, :, start : start + window.length], slice(start, start + 2 * window.length)
        # Row i of the bias band is the same distances shifted by i; query i is at position window.length + i, key j at j.
        is_filled, far = filled[:, visible], window.length + block.shape[2] - 1
        distance = torch.arange(far, far - block.shape[2] - is_filled.shape[1] + 1, -1, device=scale.device)
        row = (module(distance) * scale[:, None]).masked_fill(~in_window(distance, window.length, window.itself), -torch.inf)
        mask, empty = row.unfold(1, is_filled.shape[1], 1).flip(1)[None], None
        if not window.empty_take_mass and not is_filled.all():
            mask = mask.masked_fill(~is_filled[:, None, None], -torch.inf)
        if not window.itself:  # the first token of a document sees nothing
            empty = (mask[:, :1] == -torch.inf).all(-1, keepdim=True)
            mask = mask.masked_fill(empty, 0.0)
        out = fused_attention(block, keys[:, :, visible], values[:, :, visible], mask, dropout, scale=1.0)
        attended.append(out if empty is None else out.masked_fill(empty, 0.0))
    return torch.cat(attended, 2)
