"""A memory before it is full: nothing has to go yet, so it is a plain cache and costs what one costs.

Which entry goes first matters only once one has to. Until then the model's own attention reads all entries, and the queries
that the policy has yet to see are kept aside: all of them, or those of the last step where that step alone decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from trime.common.types import AttentionBlock, Bool, Float, Int, Ranking, Tensor
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory, MemoryState
from trime.layers.rotary import dot_products


class Queries(NamedTuple):
    """Queries, oldest first, and their positions; -1 is padding."""

    query: Float[Tensor, "b n h d"]
    position: Int[Tensor, "b n"]

    def concat(self, newer: Queries) -> Queries:
        return Queries(*(torch.cat(pair, 1) for pair in zip(self, newer, strict=True)))

    def split(self, count: int) -> tuple[Queries, Queries]:
        return Queries(*(column[:, :count] for column in self)), Queries(*(column[:, count:] for column in self))

    def take_rows(self, rows: Int[Tensor, " r"]) -> Queries:
        return Queries(*(column[rows] for column in self))


@dataclass
class DotProducts:
    """Scores of queries and keys that the model itself has rotated to their positions.

    ``scale`` and ``cap`` are the layer's: logits are ``scale`` times products (None: 1 / sqrt(d)), at most ``cap`` by a tanh.
    """

    scale: float | None = None
    cap: float | None = None

    def stored(self, key: Tensor, position: Tensor) -> Tensor:
        return key

    def scale_of(self, query: Tensor) -> float:
        """Return the factor of products with these queries."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def scaled(self, query: Tensor) -> Tensor:
        """Return queries whose products by ``dot_products`` have the layer's scale."""
        return query if self.scale is None else query * (self.scale * query.shape[-1] ** 0.5)

    def __call__(self, query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
        logits = dot_products(self.scaled(query), key)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class Filling:
    """The entries of a ``memory`` that is not full, in the order of reading: keys and values [b n g d], positions [b n].

    Padding takes a place at position -1. ``chunk``: tokens of a step of the policy. ``score``: of queries and keys.
    """

    def __init__(self, memory: Attendre, chunk: int, score: DotProducts):
        self.memory, self.chunk, self.score, self.count = memory, chunk, score, 0
        self.columns: list[Tensor] = []  # keys, values and positions, with room after the first ``count``
        self.ranking: Ranking | None = None  # of the entries whose queries the policy has seen
        self.aside: list[Queries] = []

    def takes(self, tokens: int) -> bool:
        """Return True if this number of tokens fits, every query sees all before it, and the policy can score them later."""
        memory, policy = self.memory, self.memory.keys.policy
        room = min(memory.keys.size, memory.window or memory.keys.size) - self.count
        return tokens <= room and memory.top_k is None and not (policy.uses_attention and policy.scored_by == "steps")

    @property
    def entries(self) -> list[Tensor]:
        return [column[:, : self.count] for column in self.columns]

    def append(
        self, query: Float[Tensor, "b l h d"], key: Float[Tensor, "b l g d"], value: Tensor, position: Int[Tensor, "b l"]
    ) -> None:
        """Add entries, and put the queries at the same positions aside."""
        new = (key, value, position)
        self.columns = [self.written(old, column) for old, column in zip(self.columns or new, new, strict=True)]
        self.count += position.shape[1]
        policy = self.memory.keys.policy
        if not policy.uses_attention:
            return
        queries = Queries(query, position)
        if policy.scored_by == "last_step" and bool((position >= 0).any(1).all()):
            self.aside, queries = [], self.last_step(queries)
        self.aside.append(queries)
        if sum(queries.position.shape[1] for queries in self.aside) > self.chunk:
            self.rank()

    def written(self, old: Tensor, new: Tensor) -> Tensor:
        """Return a column with new entries after the first ``count``; where there is no room it doubles."""
        end = self.count + new.shape[1]
        if torch.is_grad_enabled() and (old.requires_grad or new.requires_grad):
            return torch.cat([old[:, : self.count], new], 1)
        if end > old.shape[1] or not self.count:
            grown = new.new_zeros(len(new), min(self.memory.keys.size, max(2 * end, 64)), *new.shape[2:])
            grown[:, : self.count] = old[:, : self.count]
            old = grown
        old[:, self.count : end] = new
        return old

    def last_step(self, queries: Queries) -> Queries:
        """Return the queries of each row's last step; its steps count from the first token of a call."""
        length = queries.position.shape[1]
        if length == 1:
            return queries
        step = ((queries.position >= 0).cumsum(1) - 1) // self.chunk
        live = (queries.position >= 0) & (step == step[:, -1:])
        first = int(live.any(0).byte().argmax())
        return Queries(queries.query, queries.position.masked_fill(~live, -1)).split(first)[1]

    def mask(self, position: Int[Tensor, "b l"], has_padding: bool) -> Bool[Tensor, "b 1 l n"] | None:
        """Return the mask of the entries that queries at the last positions see; None: as the model's causal attention sees."""
        if not has_padding and position.shape[1] in (1, self.count):
            return None
        return seen_by(self.memory, position, self.entries[2])

    def rank(self) -> Ranking:
        """Return the ranking of all entries, once the policy has seen the queries that were kept aside."""
        policy, (keys, values, position) = self.memory.keys.policy, self.entries
        old = self.ranking or BoundedMemory(0, policy).empty((keys,)).ranking
        known = old.position.shape[1]
        new = position[:, known:]
        score = policy.enter((keys[:, known:], values[:, known:]), old, new).masked_fill(new < 0, -torch.inf)
        ranking = Ranking(
            position,
            torch.cat([old.score, score], 1),
            torch.cat([old.attended, torch.zeros_like(new, dtype=torch.bool)], 1),
            old.clock,
            old.written + (new >= 0).sum(1),
        )
        summary = policy.begin(ranking)
        for queries in self.aside:
            for query, at in zip(*(column.split(self.chunk, 1) for column in queries), strict=True):
                logits = self.score(query, at, keys, position).masked_fill(~self.memory.visible(at, position), -torch.inf)
                summary = policy.observe(summary, AttentionBlock(logits, at))
        self.ranking, self.aside = policy.finalize(ranking, summary), []
        return self.ranking

    def state(self) -> MemoryState:
        """Return the entries, without padding, as a state of the memory."""
        keys, values, _ = self.entries
        return self.memory.keys.fit(MemoryState((keys, values), self.rank()))

    def take_rows(self, rows: Int[Tensor, " r"]) -> None:
        self.columns = [column[rows] for column in self.columns]
        self.aside = [queries.take_rows(rows) for queries in self.aside]
        self.ranking = self.ranking and Ranking(*(column[rows] for column in self.ranking))


def seen_by(memory: Attendre, query: Int[Tensor, "b l"], key: Int[Tensor, "b n"]) -> Bool[Tensor, "b 1 l n"]:
    """Return the mask of the entries that queries see; padding sees all, since attention to nothing is not a number."""
    return memory.visible(query, key) | (query < 0)[:, None, :, None]
