"""A bounded memory of hidden states that a segment attends to beside itself: Transformer-XL's cache, and SRU++'s."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trime.memory.bounded import BoundedMemory, MemoryState, taken
from trime.models.attention_trace import AttentionTrace
from trime.types import AttentionBlock, Bool, Float, Int, Tensor


class CacheAndSegment(NamedTuple):
    """What a segment attends to: the cache by position, empty slots first, and behind it the segment itself."""

    states: Float[Tensor, "b k d"]
    position: Int[Tensor, "b k"]
    slot: Int[Tensor, "b m"]  # of the cache, in this order

    def distance(self, position: Int[Tensor, "b l"]) -> Int[Tensor, "b l k"]:
        """From each query back to each state."""
        return position[:, :, None] - self.position[:, None]

    def seen(self, position: Int[Tensor, "b l"]) -> Bool[Tensor, "b 1 l k"]:
        """No later states, and no empty slots."""
        return ((self.position[:, None] <= position[:, :, None]) & (self.position >= 0)[:, None])[:, None]

    def looked(self, weight: Float[Tensor, "b h l k"]) -> AttentionTrace:
        """Where the last query looked in the cache."""
        old = self.slot.shape[1]
        return AttentionTrace(weight[:, :, -1, :old].mean(1), self.position[:, :old])


def laid(held: MemoryState, x: Float[Tensor, "b l d"], position: Int[Tensor, "b l"]) -> CacheAndSegment:
    """The cache before a segment, and the segment."""
    slot = held.ranking.position.argsort(1)
    states = torch.cat([taken(held.columns[0], slot), x], 1)
    return CacheAndSegment(states, torch.cat([held.ranking.position.gather(1, slot), position], 1), slot)


def after(
    cache: BoundedMemory,
    held: MemoryState,
    x: Float[Tensor, "b l d"],
    position: Int[Tensor, "b l"],
    logits: Tensor | None,
    slot: Tensor,
) -> MemoryState:
    """The cache with the segment, kept without gradient. ``logits`` [b h l k] are what the policy goes by, where it does."""
    policy, size = cache.policy, slot.shape[1]
    if policy.by_attention and logits is not None:
        score = torch.full_like(logits[..., :size], -torch.inf)
        score = score.scatter(-1, slot[:, None, None].expand_as(score), logits[..., :size].detach())
        seen = policy.observe(policy.begin(held.ranking), AttentionBlock(score, position))
        held = held._replace(ranking=policy.finalize(held.ranking, seen))
    return cache.update(held, (x.detach(),), position)
