"""Attendre attention: queries wait while keys are inserted, and attend when they are evicted (Attendre section 3.2, Figure 1).

A step inserts a chunk's keys and values into a memory with any eviction policy, and its queries, together with what has to
wait with them (the residual stream), into a first-in-first-out memory. Queries that leave it attend to what the key memory
holds, which includes entries of later chunks by then: one softmax over all entries, or over the top-k of each head.

The query memory is a delay line: all rows move in step, padding included, so that as many queries leave as were inserted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn import functional as F

from trime.eviction.base import topk_mask
from trime.memory.bounded import BY_SLOT, BoundedMemory, MemoryState
from trime.models.layers.attention_cpu import Reach, attend, runs_on_cpu
from trime.models.layers.rotary import RotaryScore
from trime.models.layers.topk_attention import bucket_top, masked_softmax
from trime.types import AttentionBlock, Bool, Float, Int, Ranking, Tensor

# (query, its position, key, its position) -> logits [b h q m], a tensor of the caller's own
Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Queries(NamedTuple):
    """Queries [b n h d] and the columns [b n ...] that wait with them, oldest first; position -1 is padding."""

    columns: tuple[Tensor, ...]
    position: Int[Tensor, "b n"]

    def split(self, count: int) -> tuple[Queries, Queries]:
        """Return the first ``count`` queries, and the rest."""
        halves = zip(*((column[:, :count], column[:, count:]) for column in (*self.columns, self.position)), strict=True)
        first, rest = (Queries(tuple(half[:-1]), half[-1]) for half in halves)
        return first, rest

    def take_rows(self, rows: Int[Tensor, " n"]) -> Queries:
        """Return a copy of these rows of the batch, each as often as it is named."""
        return Queries(tuple(column[rows] for column in self.columns), self.position[rows])

    def concat(self, newer: Queries) -> Queries:
        """Return these queries followed by ``newer`` ones."""
        pairs = zip((*self.columns, self.position), (*newer.columns, newer.position), strict=True)
        *columns, position = (torch.cat(pair, 1) for pair in pairs)
        return Queries(tuple(columns), position)


class AttendreState(NamedTuple):
    """A layer's state between chunks: its memory of keys, values [b m g d] and further columns, and the waiting queries."""

    keys: MemoryState
    queries: Queries

    def take_rows(self, rows: Int[Tensor, " n"]) -> AttendreState:
        """Return a copy of the state with these rows, each as often as it is named."""
        return AttendreState(self.keys.take_rows(rows), self.queries.take_rows(rows))


class Retrieved(NamedTuple):
    """The entries that queries could see (a logit of -inf: not), those they attended to, and positions and metadata of all."""

    logits: Float[Tensor, "b h q m"]
    mask: Bool[Tensor, "b h q m"] | None  # None: all that are visible
    position: Int[Tensor, "b m"]
    metadata: tuple[Tensor, ...]  # further columns [b m] of the entries, such as the document

    @property
    def similarity(self) -> Float[Tensor, "b h q m"]:
        """Return the similarity of the retrieved entries; -inf: not retrieved."""
        return self.logits if self.mask is None else self.logits.masked_fill(~self.mask, -torch.inf)

    def top(self, count: int) -> tuple[Float[Tensor, "b h q k"], Int[Tensor, "b h q k"], tuple[Tensor, ...]]:
        """Return similarity, position and metadata of the ``count`` most similar entries; -1 where there are fewer."""
        similarity, slot = self.similarity.topk(min(count, self.logits.shape[-1]), dim=-1)
        columns = (self.position, *self.metadata)
        rows = torch.arange(len(slot), device=slot.device)[:, None, None, None]
        position, *metadata = (column[rows, slot].masked_fill(similarity == -torch.inf, -1) for column in columns)
        return similarity, position, tuple(metadata)


class Attended(NamedTuple):
    """Logits of queries, -inf where they see nothing; attended values; retrieved entries, None where all visible ones are."""

    logits: Float[Tensor, "b h q m"]
    values: Float[Tensor, "b h q d"]
    retrieved: Bool[Tensor, "b h q m"] | None


class AttentionOutput(NamedTuple):
    """Attended values of the queries that left, the columns that had waited with them, and what they retrieved."""

    attended: Float[Tensor, "b q h d"]
    payload: tuple[Tensor, ...]
    position: Int[Tensor, "b q"]
    retrieved: Retrieved


@dataclass(frozen=True)
class Attendre:
    """A layer's memories: ``keys`` holds keys and values, and ``query_size`` queries wait (0: they attend at once).

    ``top_k``: entries that a query attends to in each head, None for all. ``search``: exact (the top-k), or buckets (the best
    entry of each of ``top_k`` strided buckets). ``causal``: no entry after the query. ``window``: no entry at that distance or
    beyond, for models trained with a sliding window. An entry is a key and a value [b l g d], and metadata columns [b l].
    """

    keys: BoundedMemory
    query_size: int = 0
    top_k: int | None = None
    causal: bool = False
    window: int | None = None
    search: str = "exact"

    def with_room(self, entries: int) -> Attendre:
        """Return a memory with so many more slots, for the tokens of a question that looks at its entries."""
        return replace(self, keys=BoundedMemory(self.keys.size + entries, self.keys.policy.for_questions()))

    def initial_state(self, entries: tuple[Tensor, ...], queries: Queries) -> AttendreState:
        """Return an empty state for entries and queries of these shapes."""
        return AttendreState(self.keys.empty(entries), queries.split(0)[0])

    def step(
        self, state: AttendreState, entries: tuple[Tensor, ...], queries: Queries, score: Score, overwrite: bool = False
    ) -> tuple[AttendreState, AttentionOutput]:
        """Insert a chunk's entries and its queries, at the same positions; return the output of the queries that leave.

        ``overwrite`` writes the entries into the tensors of ``state``, which is of no use afterwards.
        """
        write = self.keys.overwrite if overwrite else self.keys.update
        keys = write(state.keys, entries, queries.position)
        waiting = state.queries.concat(queries)
        return self.release(AttendreState(keys, waiting), max(0, waiting.position.shape[1] - self.query_size), score)

    def release(self, state: AttendreState, count: int, score: Score) -> tuple[AttendreState, AttentionOutput]:
        """Let the ``count`` queries that have waited longest attend; without a new chunk this drains or flushes the memory."""
        leaving, waiting = state.queries.split(count)
        keys, output = self.attend(state.keys, leaving, score)
        return AttendreState(keys, waiting), output

    def attend(self, state: MemoryState, leaving: Queries, score: Score) -> tuple[MemoryState, AttentionOutput]:
        """Attend to the memory in one softmax; the eviction policy sees all scores."""
        used = self.used_slots(state.ranking)
        (query, *payload), columns = leaving.columns, (column[:, :used] for column in state.columns)
        (key, value, *metadata), of = columns, state.ranking.position[:, :used]
        logits, attended, retrieved = self.look((query, leaving.position, key, of), value, score)
        ranking = self.learn(state.ranking, AttentionBlock(logits, leaving.position, retrieved))
        seen = Retrieved(logits, retrieved, of, tuple(metadata))
        output = AttentionOutput(attended.transpose(1, 2), tuple(payload), leaving.position, seen)
        return state._replace(ranking=ranking), output

    def look(
        self, pairs: tuple[Tensor, Tensor, Tensor, Tensor], value: Tensor, score: Score, sees_all: bool = False
    ) -> Attended:
        """Return what queries see of entries: queries and keys, each with its positions, and values [b m g d].

        ``sees_all``: it is known that every query sees all entries.
        """
        if self.search == "exact" and runs_on_cpu(pairs[0], pairs[2], value):
            return self.attend_on_cpu(pairs, value, score, sees_all)
        return self.attend_anywhere(pairs, value, score)

    def learn(self, ranking: Ranking, block: AttentionBlock) -> Ranking:
        """Return the ranking after a step in which queries saw the entries of the first slots."""
        policy, old = self.keys.policy, slots_of(ranking, block.score.shape[-1])
        return with_slots(ranking, policy.finalize(old, policy.observe(policy.begin(old), block)))

    def used_slots(self, ranking: Ranking) -> int:
        """Return how many slots a memory on the CPU has filled so far, from the first on; on other devices all it has."""
        if ranking.written.device.type != "cpu":
            return self.keys.size
        return min(self.keys.size, int(ranking.written.max()))

    def attend_on_cpu(
        self, pairs: tuple[Tensor, Tensor, Tensor, Tensor], value: Tensor, score: Score, sees_all: bool = False
    ) -> Attended:
        """Return what ``attend_anywhere`` does, in one pass over the scores of every query."""
        if self.causal and isinstance(score, RotaryScore):
            (logits, far), longest = score.causal_parts(*pairs), score.longest
        else:
            logits, far, longest = score(*pairs), None, None
        reach = Reach(self.causal, self.window, longest, sees_all)
        attended, retrieved = attend(logits, far, pairs[1], pairs[3], value, self.top_k, reach)
        return Attended(logits, attended, retrieved)

    def attend_anywhere(self, pairs: tuple[Tensor, Tensor, Tensor, Tensor], value: Tensor, score: Score) -> Attended:
        """Return logits, attended values and retrieved entries of queries and keys, each with its positions."""
        logits = score(*pairs).masked_fill(~self.visible(pairs[1], pairs[3]), -torch.inf)
        mask = retrieval_mask(logits, self.top_k, self.search)
        weight = masked_softmax(logits if mask is None else logits.masked_fill(~mask, -torch.inf))
        if mask is None and self.top_k is not None:
            mask = logits > -torch.inf  # at most top_k entries: all visible ones are retrieved
        attended = (weight.unflatten(1, (value.shape[2], -1)) @ value.transpose(1, 2)[:, :, None]).flatten(1, 2)
        return Attended(logits, attended, mask)

    def visible(self, query: Int[Tensor, "b q"], key: Int[Tensor, "b m"]) -> Bool[Tensor, "b 1 q m"]:
        """Return which entries each query may attend to: no padding, none after a causal query, none beyond the window."""
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


def scored_as(state: MemoryState, larger: MemoryState) -> MemoryState:
    """Return the state with the scores that its entries have in a larger memory, which holds them in the same slots."""
    old, empty = state.ranking, state.ranking.position < 0
    new = slots_of(larger.ranking, empty.shape[1])
    assert torch.equal(new.position.masked_fill(empty, -1), old.position)
    score = new.score.masked_fill(empty, -torch.inf)
    return state._replace(ranking=old._replace(score=score, attended=new.attended & ~empty))


def slots_of(ranking: Ranking, count: int) -> Ranking:
    """Return the ranking of the first ``count`` slots."""
    return ranking._replace(**{name: getattr(ranking, name)[:, :count] for name in BY_SLOT})


def with_slots(ranking: Ranking, first: Ranking) -> Ranking:
    """Return the ranking with ``first`` as that of its first slots."""
    count, size = first.position.shape[1], ranking.position.shape[1]
    if count == size:
        return first
    return first._replace(**{name: torch.cat([getattr(first, name), getattr(ranking, name)[:, count:]], 1) for name in BY_SLOT})
