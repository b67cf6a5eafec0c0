"""A memory of fixed size inside a layer, or for contexts: an eviction policy decides what stays.

State goes in and comes out. Shapes never change: empty slots have position -1 and score -inf, survivors
keep their slot, new entries take freed slots oldest first, and rows are reset one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trime.eviction.base import EvictionPolicy
from trime.types import Bool, Int, Ranking, Tensor


class MemoryState(NamedTuple):
    """The state: what is stored, column by column [b m ...], and what the policy knows of it."""

    columns: tuple[Tensor, ...]
    ranking: Ranking


class Evicted(NamedTuple):
    """What had to go, oldest first, padded with position -1 (there the columns mean nothing)."""

    columns: tuple[Tensor, ...]
    position: Int[Tensor, "b n"]


class BoundedMemory:
    """Keeps the ``size`` entries that its policy scores highest; at size 0 all that enters leaves at once."""

    def __init__(self, size: int, policy: EvictionPolicy):
        if size < 0:
            raise ValueError(f"memory_size={size}: the number of entries that a memory holds, at least 0")
        self.size, self.policy = size, policy

    def empty(self, columns: tuple[Tensor, ...]) -> MemoryState:
        """Nothing stored, for columns [b n ...] of that kind."""
        b, device, m = len(columns[0]), columns[0].device, self.size
        none = torch.full((b, m), -1, dtype=torch.long, device=device)
        scores = torch.full((b, m), -torch.inf, dtype=torch.float64, device=device)
        clock = none.new_full((b,), -1)
        ranking = Ranking(none, scores, none >= 0, clock, torch.zeros_like(clock))
        return MemoryState(tuple(column.new_zeros(b, m, *column.shape[2:]) for column in columns), ranking)

    def reset(self, held: MemoryState, rows: Bool[Tensor, " b"]) -> MemoryState:
        """Rows without their entries, the columns zero."""
        old, none = held.ranking, rows[:, None]
        ranking = Ranking(
            old.position.masked_fill(none, -1),
            old.score.masked_fill(none, -torch.inf),
            old.attended & ~none,
            old.clock.masked_fill(rows, -1),
            old.written.masked_fill(rows, 0),
        )
        return MemoryState(tuple(c.masked_fill(rows.view(-1, *[1] * (c.dim() - 1)), 0) for c in held.columns), ranking)

    def insert(
        self, held: MemoryState, columns: tuple[Tensor, ...], position: Int[Tensor, "b n"]
    ) -> tuple[MemoryState, Evicted]:
        """The best of old and new entries, and those that had to go; position -1 is no entry."""
        moved, ranking, kept = self.decided(held.ranking, position)
        gone = self.gone(held, columns, torch.cat([held.ranking.position, position], 1), kept)
        return MemoryState(tuple(map(moved.into, held.columns, columns)), ranking), gone

    def update(self, held: MemoryState, columns: tuple[Tensor, ...], position: Int[Tensor, "b n"]) -> MemoryState:
        """The best of old and new entries; what had to go is lost."""
        moved, ranking, _ = self.decided(held.ranking, position)
        return MemoryState(tuple(map(moved.into, held.columns, columns)), ranking)

    def overwrite(self, held: MemoryState, columns: tuple[Tensor, ...], position: Int[Tensor, "b n"]) -> MemoryState:
        """The same within the tensors of ``held``, at the cost of the new entries alone.

        ``held`` itself may be written to again with the same entries: the same slots are freed for them.
        """
        moved, ranking, _ = self.decided(held.ranking, position)
        return MemoryState(tuple(map(moved.onto, held.columns, columns)), ranking)

    def decided(self, old: Ranking, position: Int[Tensor, "b n"]) -> tuple[Moved, Ranking, Bool[Tensor, "b c"]]:
        """Which new entries enter and where, the ranking after that, and which candidates stay, old ones first."""
        count = min(position.shape[1], self.size)
        score = self.policy.admit(old, position).masked_fill(position < 0, -torch.inf)
        kept = self.kept(torch.cat([old.position, position], 1), torch.cat([old.score, score], 1))
        stays, enters = kept.split([self.size, position.shape[1]], 1)
        slot, source = first(~stays, count), first(enters, count)
        moved = Moved(slot, source, enters.gather(1, source))
        ranking = Ranking(
            moved.into(old.position, position),
            moved.into(old.score, score),
            moved.into(old.attended, torch.zeros_like(enters)),
            old.clock,
            old.written + (position >= 0).sum(1),
        )
        return moved, ranking, kept

    def kept(self, position: Int[Tensor, "b c"], score: Tensor) -> Bool[Tensor, "b c"]:
        """The candidates that stay: best score first, among equals the newer or the older, no empty ones."""
        there = position >= 0
        if int(there.sum(1).max()) <= self.size:  # nothing has to go: nothing is sorted
            return there
        age = position if self.policy.newest_first else -position
        by_age = age.argsort(1, descending=True)
        order = by_age.gather(1, score.gather(1, by_age).argsort(dim=1, descending=True, stable=True))
        best = torch.zeros_like(position, dtype=torch.bool).scatter(1, order[:, : self.size], True)
        return best & there

    def gone(
        self, held: MemoryState, columns: tuple[Tensor, ...], position: Int[Tensor, "b c"], kept: Bool[Tensor, "b c"]
    ) -> Evicted:
        """What leaves: never more than came."""
        leaves = ~kept & (position >= 0)
        ages = position.masked_fill(~leaves, torch.iinfo(position.dtype).max)
        index = ages.argsort(1)[:, : columns[0].shape[1]]
        found = position.gather(1, index).masked_fill(~leaves.gather(1, index), -1)
        pairs = zip(held.columns, columns, strict=True)
        return Evicted(tuple(of_both(old, new, index) for old, new in pairs), found)


class Moved(NamedTuple):
    """New entries ``source`` on their way into slots ``slot``, where ``true``; elsewhere the slot stays as it is."""

    slot: Int[Tensor, "b n"]
    source: Int[Tensor, "b n"]
    true: Bool[Tensor, "b n"]

    def into(self, old: Tensor, new: Tensor) -> Tensor:
        """A column after the move."""
        return self.onto(old.clone(), new)

    def onto(self, old: Tensor, new: Tensor) -> Tensor:
        """The same, written into the column itself."""
        true = self.true.view(*self.true.shape, *[1] * (old.dim() - 2))
        value = torch.where(true, taken(new, self.source), taken(old, self.slot))
        old[torch.arange(len(old), device=old.device)[:, None], self.slot] = value
        return old


def first(chosen: Bool[Tensor, "b n"], count: int) -> Int[Tensor, "b _"]:
    """The numbers of ``count`` cells, the chosen ones before all others, each group in order."""
    return (~chosen).byte().argsort(dim=1, stable=True)[:, :count]


def wide(index: Tensor, column: Tensor) -> Tensor:
    """An index or a mask [b n] over axis 1 of a column [b m ...], as wide as its cells."""
    return index.view(*index.shape, *[1] * (column.dim() - 2)).expand(-1, -1, *column.shape[2:])


def taken(column: Tensor, index: Int[Tensor, "b n"]) -> Tensor:
    """Cells of a column [b m ...]."""
    if column.dim() == 2:
        return column.gather(1, index)
    b, m = column.shape[:2]
    rows = m * torch.arange(b, device=index.device)[:, None]  # whole cells are copied, which gather does number by number
    return column.flatten(0, 1).index_select(0, (rows + index).flatten()).unflatten(0, index.shape)


def of_both(old: Tensor, new: Tensor, index: Int[Tensor, "b n"]) -> Tensor:
    """Cells of a column and, counted on from its end, of the one behind it; the two are never joined."""
    m, n = old.shape[1], new.shape[1]
    if not m or not n:
        return taken(old if m else new, index)
    return torch.where(wide(index < m, new), taken(old, index.clamp(max=m - 1)), taken(new, (index - m).clamp(0, n - 1)))
