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

from trime.eviction.base import largest
from trime.memory.bounded import BoundedMemory, Held
from trime.models.retrieval import attention
from trime.types import Attended, Bool, Float, Int, Tensor

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
    """What a layer carries from chunk to chunk: keys and values [b m g d], and the queries that wait."""

    keys: Held
    queries: Queries


class Left(NamedTuple):
    """What queries that attended got from the memory, and what had waited along with them."""

    attended: Float[Tensor, "b q h d"]
    along: tuple[Tensor, ...]
    position: Int[Tensor, "b q"]


@dataclass(frozen=True)
class Attendre:
    """A layer's memories: ``keys`` of K/V entries, and room for ``waiting`` queries (0: they attend at once).

    ``top_k``: entries that a query of a head attends to, null for all. ``causal``: none after the query itself.
    ``window``: none as far away as that, where a model was trained so.
    """

    keys: BoundedMemory
    waiting: int = 0
    top_k: int | None = None
    causal: bool = False
    window: int | None = None

    def start(self, own: tuple[Tensor, Tensor], queries: Queries) -> Waiting:
        """Nothing yet, for keys and values [b l g d] and queries of that kind."""
        return Waiting(self.keys.empty(own), queries.split(0)[0])

    def step(self, state: Waiting, own: tuple[Tensor, Tensor], queries: Queries, score: Score) -> tuple[Waiting, Left]:
        """Reads a chunk: keys and values [b l g d], and queries of the same positions."""
        keys, _ = self.keys.insert(state.keys, own, queries.position)
        waiting = state.queries.joined(queries)
        return self.release(Waiting(keys, waiting), max(0, waiting.position.shape[1] - self.waiting), score)

    def release(self, state: Waiting, count: int, score: Score) -> tuple[Waiting, Left]:
        """The ``count`` queries that waited longest attend; without a chunk, this drains or, all of them, flushes."""
        leaving, waiting = state.queries.split(count)
        keys, left = self.attend(state.keys, leaving, score)
        return Waiting(keys, waiting), left

    def attend(self, held: Held, leaving: Queries, score: Score) -> tuple[Held, Left]:
        """One softmax over what the memory holds; its policy hears of all scores."""
        (query, *along), (key, value), place = leaving.columns, held.columns, held.ranking.position
        logits = score(query, leaving.position, key, place).masked_fill(~self.visible(leaving.position, place), -torch.inf)
        retrieved = best(logits, self.top_k)
        weight = attention(logits if retrieved is None else logits.masked_fill(~retrieved, -torch.inf))
        attended = (weight.unflatten(1, (value.shape[2], -1)) @ value.transpose(1, 2)[:, :, None]).flatten(1, 2)
        policy, block = self.keys.policy, Attended(logits, leaving.position, retrieved)
        ranking = policy.settle(held.ranking, policy.observe(policy.begin(held.ranking), block))
        return held._replace(ranking=ranking), Left(attended.transpose(1, 2), tuple(along), leaving.position)

    def visible(self, query: Int[Tensor, "b q"], key: Int[Tensor, "b m"]) -> Bool[Tensor, "b 1 q m"]:
        """Entries and queries that are there; causal ones not after the query."""
        distance = query[:, :, None] - key[:, None]
        seen = (query >= 0)[:, :, None] & (key >= 0)[:, None]
        seen = seen & (distance >= 0) if self.causal else seen
        return (seen if self.window is None else seen & (distance.abs() < self.window))[:, None]


def best(logits: Float[Tensor, "b h q m"], top_k: int | None) -> Bool[Tensor, "b h q m"] | None:
    """The ``top_k`` largest of each row; None where these are all."""
    if top_k is None or top_k >= logits.shape[-1]:
        return None
    return largest(logits, top_k)
