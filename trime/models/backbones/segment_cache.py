"""A bounded memory of hidden states that a segment attends to beside itself: the cache of Transformer-XL and of SRU++."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trime.memory.bounded import BoundedMemory, MemoryState, take_slots
from trime.models.attention_trace import AttentionTrace
from trime.types import AttentionBlock, Bool, Float, Int, Tensor


class CacheAndSegment(NamedTuple):
    """What a segment attends to: the cache in order of position, empty slots first, followed by the segment itself."""

    states: Float[Tensor, "b k d"]
    position: Int[Tensor, "b k"]
    slot: Int[Tensor, "b m"]  # the cache's slots in this order

    def distance(self, position: Int[Tensor, "b l"]) -> Int[Tensor, "b l k"]:
        """Return the distance from each query back to each state."""
        return position[:, :, None] - self.position[:, None]

    def visible(self, position: Int[Tensor, "b l"]) -> Bool[Tensor, "b 1 l k"]:
        """Return the causal mask: no later states, and no empty slots."""
        return ((self.position[:, None] <= position[:, :, None]) & (self.position >= 0)[:, None])[:, None]

    def attention_trace(self, weight: Float[Tensor, "b h l k"]) -> AttentionTrace:
        """Return the last query's attention to the cache."""
        size = self.slot.shape[1]
        return AttentionTrace(weight[:, :, -1, :size].mean(1), self.position[:, :size])


def concat_cache(state: MemoryState, x: Float[Tensor, "b l d"], position: Int[Tensor, "b l"]) -> CacheAndSegment:
    """Return the cache followed by the segment."""
    slot = state.ranking.position.argsort(1)
    states = torch.cat([take_slots(state.columns[0], slot), x], 1)
    return CacheAndSegment(states, torch.cat([state.ranking.position.gather(1, slot), position], 1), slot)


def update_cache(
    cache: BoundedMemory,
    state: MemoryState,
    x: Float[Tensor, "b l d"],
    position: Int[Tensor, "b l"],
    logits: Tensor | None,
    slot: Tensor,
) -> MemoryState:
    """Return the cache after inserting the segment, detached.

    ``logits`` [b h l k] update the scores of an eviction policy that goes by attention.
    """
    policy, size = cache.policy, slot.shape[1]
    if policy.uses_attention and logits is not None:
        score = torch.full_like(logits[..., :size], -torch.inf)
        score = score.scatter(-1, slot[:, None, None].expand_as(score), logits[..., :size].detach())
        summary = policy.observe(policy.begin(state.ranking), AttentionBlock(score, position))
        state = state._replace(ranking=policy.finalize(state.ranking, summary))
    return cache.update(state, (x.detach(),), position)
