"""Attention to a layer's memory (Attendre section 3.2): one softmax over all entries, or over the top-k of each head.

The eviction policy learns from all scores. Memories that read are ``trime.kv.layer_memory.LayerMemory``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn import functional as F

from trime.common.types import AttentionBlock, Bool, Float, Int, Ranking, Tensor
from trime.kv.bounded import BY_SLOT, BoundedMemory, MemoryState
from trime.kv.eviction.base import topk_mask
from trime.layers.attention_cpu import Reach, attend, runs_on_cpu
from trime.layers.rotary import RotaryScore
from trime.layers.topk_attention import bucket_top, masked_softmax

HALF = (torch.float16, torch.bfloat16)
# (query, its position, key, its position) -> logits [b h q m], a tensor of the caller's own
Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Attended(NamedTuple):
    """Logits of queries, -inf where they see nothing; attended values; retrieved entries, None where all visible ones are."""

    logits: Float[Tensor, "b h q m"]
    values: Float[Tensor, "b h q d"]
    retrieved: Bool[Tensor, "b h q m"] | None

    @property
    def similarity(self) -> Float[Tensor, "b h q m"]:
        """The logits of the retrieved entries, -inf for all others."""
        return self.logits if self.retrieved is None else self.logits.masked_fill(~self.retrieved, -torch.inf)


@dataclass(frozen=True)
class Attendre:
    """A layer's memories: ``keys`` holds keys and values [b l g d], ``query_size`` queries wait (0: they attend at once)."""

    keys: BoundedMemory
    query_size: int = 0
    top_k: int | None = None  # entries that a query attends to in each head; None: all
    causal: bool = False  # no entry after the query
    window: int | None = None  # no entry at that distance or beyond
    search: str = "exact"  # exact, or buckets: the best entry of each of ``top_k`` strided buckets

    def of_size(self, size: int) -> Attendre:
        """Return a memory of another number of entries."""
        return replace(self, keys=self.keys.of_size(size))

    def with_room(self, entries: int) -> Attendre:
        """Return a memory with this number of further slots, for the tokens of a question that looks at its entries."""
        larger = self.of_size(self.keys.size + entries)
        larger.keys.policy = self.keys.policy.for_questions()
        return larger

    def look(
        self, pairs: tuple[Tensor, Tensor, Tensor, Tensor], value: Tensor, score: Score, sees_all: bool = False
    ) -> Attended:
        """Return the attention of queries to keys with positions and values [b m g d]; ``sees_all``: they see everything."""
        query, at, key, of = pairs
        if query.dtype in HALF:  # logits are as exact as those of the model's own attention, which adds up in float32
            query, key, value = query.float(), key.float(), value.float()
            pairs = query, at, key, of
        if self.search == "exact" and runs_on_cpu(query, key, value):  # in one pass over the scores of every query
            if self.causal and isinstance(score, RotaryScore):
                (logits, far), longest = score.causal_parts(*pairs), score.longest
            else:
                logits, far, longest = score(*pairs), None, None
            reach = Reach(self.causal, self.window, longest, sees_all)
            return Attended(logits, *attend(logits, far, at, of, value, self.top_k, reach))
        logits = score(*pairs).masked_fill(~self.visible(at, of), -torch.inf)
        mask = retrieval_mask(logits, self.top_k, self.search)
        weight = masked_softmax(logits if mask is None else logits.masked_fill(~mask, -torch.inf))
        if mask is None and self.top_k is not None:
            mask = logits > -torch.inf  # at most top_k entries: all visible ones are retrieved
        attended = (weight.unflatten(1, (value.shape[2], -1)) @ value.transpose(1, 2)[:, :, None]).flatten(1, 2)
        return Attended(logits, attended, mask)

    def learn(self, ranking: Ranking, block: AttentionBlock) -> Ranking:
        """Return the ranking after a step in which queries saw the entries of the first slots."""
        policy, count = self.keys.policy, block.score.shape[-1]
        first = slots_of(ranking, count)
        first = policy.finalize(first, policy.observe(policy.begin(first), block))
        if count == ranking.position.shape[1]:
            return first
        joined = {name: torch.cat([getattr(first, name), getattr(ranking, name)[:, count:]], 1) for name in BY_SLOT}
        return first._replace(**joined)

    def used_slots(self, ranking: Ranking) -> int:
        """Return the number of slots that a memory on the CPU has filled, from the first on; on other devices all it has."""
        if ranking.written.device.type != "cpu":
            return self.keys.size
        return min(self.keys.size, int(ranking.written.max()))

    def visible(self, query: Int[Tensor, "b q"], key: Int[Tensor, "b m"]) -> Bool[Tensor, "b 1 q m"]:
        """Return the mask of the entries to attend to: no padding, none after a causal query, none beyond the window."""
        distance = query[:, :, None] - key[:, None]
        mask = (query >= 0)[:, :, None] & (key >= 0)[:, None]
        mask = mask & (distance >= 0) if self.causal else mask
        return (mask if self.window is None else mask & (distance.abs() < self.window))[:, None]


def retrieval_mask(logits: Float[Tensor, "b h q m"], top_k: int | None, search: str) -> Bool[Tensor, "b h q m"] | None:
    """Return a mask of each row's ``top_k`` largest logits, or of each bucket's (slot mod k) largest; None: all entries."""
    if top_k is None or top_k >= logits.shape[-1]:
        return None
    if search == "exact":
        return topk_mask(logits, top_k)
    padded = F.pad(logits, (0, -logits.shape[-1] % top_k), value=-torch.inf)
    mask = torch.zeros_like(padded, dtype=torch.bool).scatter(-1, bucket_top(padded, top_k), True)
    return mask[..., : logits.shape[-1]]


def copy_scores_from(state: MemoryState, larger: MemoryState) -> MemoryState:
    """Return the state with the scores that its entries have in a larger memory, which holds them in the same slots."""
    old, empty = state.ranking, state.ranking.position < 0
    new = slots_of(larger.ranking, empty.shape[1])
    assert torch.equal(new.position.masked_fill(empty, -1), old.position)
    score = new.score.masked_fill(empty, -torch.inf)
    return state._replace(ranking=old._replace(score=score, attended=new.attended & ~empty))


def slots_of(ranking: Ranking, count: int) -> Ranking:
    return ranking._replace(**{name: getattr(ranking, name)[:, :count] for name in BY_SLOT})
