"""Attendre attention: queries wait while keys come in, and attend when they are evicted (Attendre section 3.2, Figure 1).

A step inserts a chunk's keys and values into a memory that any policy keeps, and its queries, with what must wait
along with them (the residual stream), into a first-in-first-out memory; the queries that leave it attend to what the
first one holds, which has entries of later chunks by then: one softmax over all of them, or over the best of each head.

The query memory is a delay: rows move in step, padding among them, so that as many leave as came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from trime.eviction.base import largest
from trime.memory.bounded import BoundedMemory, MemoryState
from trime.models.layers.topk_attention import attention, bucket_top
from trime.types import AttentionBlock, Bool, Float, Int, Tensor

Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # query, its position, key, its position to logits [b h q m]


class Queries(NamedTuple):
    """Queries [b n h d], then what waits along with them [b n ...], oldest first; position -1 is padding."""

    columns: tuple[Tensor, ...]
    position: Int[Tensor, "b n"]

    def split(self, count: int) -> tuple[Queries, Queries]:
        """The first ``count``, and the others."""
        halves = zip(*((column[:, :count], column[:, count:]) for column in (*self.columns, self.position)), strict=True)
        first, others = (Queries(tuple(half[:-1]), half[-1]) for half in halves)
        return first, others

    def joined(self, newer: Queries) -> Queries:
        """Both, one after the other."""
        pairs = zip((*self.columns, self.position), (*newer.columns, newer.position), strict=True)
        *columns, position = (torch.cat(pair, 1) for pair in pairs)
        return Queries(tuple(columns), position)


class Waiting(NamedTuple):
    """What a layer carries from chunk to chunk: keys, values [b m g d] and more of entries, and the queries that wait."""

    keys: MemoryState
    queries: Queries


class Retrieved(NamedTuple):
    """Which entries queries attended to: how similar they are (-inf: not retrieved), where they stand, what is told of them."""

    similarity: Float[Tensor, "b h q m"]
    position: Int[Tensor, "b m"]
    told: tuple[Tensor, ...]  # columns [b m] behind keys and values, such as the document

    def best(self, count: int) -> tuple[Float[Tensor, "b h q k"], Int[Tensor, "b h q k"], tuple[Tensor, ...]]:
        """The most similar entries: similarity, position, and what is told of them; -1 where there are fewer."""
        similarity, slot = self.similarity.topk(min(count, self.similarity.shape[-1]), dim=-1)
        columns = (self.position, *self.told)
        rows = torch.arange(len(slot), device=slot.device)[:, None, None, None]
        position, *told = (column[rows, slot].masked_fill(similarity == -torch.inf, -1) for column in columns)
        return similarity, position, tuple(told)


class AttentionOutput(NamedTuple):
    """What queries that attended got from the memory, what had waited along with them, and what they retrieved."""

    attended: Float[Tensor, "b q h d"]
    along: tuple[Tensor, ...]
    position: Int[Tensor, "b q"]
    retrieved: Retrieved


@dataclass(frozen=True)
class Attendre:
    """A layer's memories: ``keys`` of K/V entries, and room for ``waiting`` queries (0: they attend at once).

    ``top_k``: entries that a query of a head attends to, null for all; ``search``: the best ones (exact), or the best
    one of each of ``top_k`` strided buckets. ``causal``: none after the query itself. ``window``: none as far away as
    that, where a model was trained so. Entries are keys and values [b l g d], and columns [b l] that tell of them.
    """

    keys: BoundedMemory
    waiting: int = 0
    top_k: int | None = None
    causal: bool = False
    window: int | None = None
    search: str = "exact"

    def start(self, own: tuple[Tensor, ...], queries: Queries) -> Waiting:
        """Nothing yet, for entries and queries of that kind."""
        return Waiting(self.keys.empty(own), queries.split(0)[0])

    def step(self, state: Waiting, own: tuple[Tensor, ...], queries: Queries, score: Score) -> tuple[Waiting, AttentionOutput]:
        """Reads a chunk: entries, and queries of the same positions."""
        keys = self.keys.update(state.keys, own, queries.position)
        waiting = state.queries.joined(queries)
        return self.release(Waiting(keys, waiting), max(0, waiting.position.shape[1] - self.waiting), score)

    def release(self, state: Waiting, count: int, score: Score) -> tuple[Waiting, AttentionOutput]:
        """The ``count`` queries that waited longest attend; without a chunk, this drains or, all of them, flushes."""
        leaving, waiting = state.queries.split(count)
        keys, left = self.attend(state.keys, leaving, score)
        return Waiting(keys, waiting), left

    def attend(self, held: MemoryState, leaving: Queries, score: Score) -> tuple[MemoryState, AttentionOutput]:
        """One softmax over what the memory holds; its policy hears of all scores."""
        (query, *along), (key, value, *told), place = leaving.columns, held.columns, held.ranking.position
        logits = score(query, leaving.position, key, place).masked_fill(~self.visible(leaving.position, place), -torch.inf)
        retrieved = best(logits, self.top_k, self.search)
        similarity = logits if retrieved is None else logits.masked_fill(~retrieved, -torch.inf)
        weight = attention(similarity)
        attended = (weight.unflatten(1, (value.shape[2], -1)) @ value.transpose(1, 2)[:, :, None]).flatten(1, 2)
        if retrieved is None and self.top_k is not None:
            retrieved = logits > -torch.inf  # the best top_k are all that is visible
        policy, block = self.keys.policy, AttentionBlock(logits, leaving.position, retrieved)
        ranking = policy.finalize(held.ranking, policy.observe(policy.begin(held.ranking), block))
        found = Retrieved(similarity, place, tuple(told))
        return held._replace(ranking=ranking), AttentionOutput(attended.transpose(1, 2), tuple(along), leaving.position, found)

    def visible(self, query: Int[Tensor, "b q"], key: Int[Tensor, "b m"]) -> Bool[Tensor, "b 1 q m"]:
        """Entries and queries that are there; causal ones not after the query."""
        distance = query[:, :, None] - key[:, None]
        seen = (query >= 0)[:, :, None] & (key >= 0)[:, None]
        seen = seen & (distance >= 0) if self.causal else seen
        return (seen if self.window is None else seen & (distance.abs() < self.window))[:, None]


def best(logits: Float[Tensor, "b h q m"], top_k: int | None, search: str) -> Bool[Tensor, "b h q m"] | None:
    """The ``top_k`` largest of each row, or the largest of each of its buckets (slot mod k); None where these are all."""
    if top_k is None or top_k >= logits.shape[-1]:
        return None
    if search == "exact":
        return largest(logits, top_k)
    filled = F.pad(logits, (0, -logits.shape[-1] % top_k), value=-torch.inf)
    found = torch.zeros_like(filled, dtype=torch.bool).scatter(-1, bucket_top(filled, top_k), True)
    return found[..., : logits.shape[-1]]
