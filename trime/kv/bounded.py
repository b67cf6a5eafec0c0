"""A memory of fixed size, inside a layer or for contexts, whose eviction policy decides which entries are kept.

Each operation takes a state and returns a new one; only ``overwrite`` changes the tensors of the old one. Shapes never
change: empty slots have position -1 and score -inf, surviving entries keep their slots, new entries fill free slots oldest
first, and each row can be reset by itself.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch

from trime.common.types import Bool, Float, Int, Ranking, Tensor
from trime.kv.eviction.base import EvictionPolicy

BY_SLOT = ("position", "score", "attended")  # the columns of a ranking


class MemoryState(NamedTuple):
    """The entries of a memory as columns [b m ...], and the policy's ranking of them."""

    columns: tuple[Tensor, ...]
    ranking: Ranking

    def take_rows(self, rows: Int[Tensor, " n"]) -> MemoryState:
        """Return a copy of the entries of these rows, and of their ranking."""
        return MemoryState(tuple(column[rows] for column in self.columns), Ranking(*(column[rows] for column in self.ranking)))


class BoundedMemory:
    """A memory of the ``size`` entries that its policy scores highest.

    ValueError if ``size`` is negative, UserError if it leaves the policy no choice (``EvictionPolicy.check_size``).
    """

    def __init__(self, size: int, policy: EvictionPolicy):
        if size < 0:
            raise ValueError(f"memory_size={size} must be at least 0: it is the number of entries that a memory holds")
        policy.check_size(size)
        self.size, self.policy = size, policy

    def of_size(self, size: int) -> BoundedMemory:
        """Return a memory of another size, which may be too small for the policy to choose much."""
        other = copy.copy(self)
        other.size = size
        return other

    def empty(self, columns: tuple[Tensor, ...]) -> MemoryState:
        """Return a state without entries for columns [b n ...] of the same shapes and types."""
        b, device, m = len(columns[0]), columns[0].device, self.size
        none = torch.full((b, m), -1, dtype=torch.long, device=device)
        scores = torch.full((b, m), -torch.inf, dtype=torch.float64, device=device)
        clock = none.new_full((b,), -1)
        ranking = Ranking(none, scores, none >= 0, clock, torch.zeros_like(clock))
        return MemoryState(tuple(column.new_zeros(b, m, *column.shape[2:]) for column in columns), ranking)

    def reset(self, state: MemoryState, rows: Bool[Tensor, " b"]) -> MemoryState:
        """Return the state with these rows emptied and their columns set to zero."""
        old, slots = state.ranking, rows[:, None]
        ranking = Ranking(
            old.position.masked_fill(slots, -1),
            old.score.masked_fill(slots, -torch.inf),
            old.attended & ~slots,
            old.clock.masked_fill(rows, -1),
            old.written.masked_fill(rows, 0),
        )
        return MemoryState(tuple(c.masked_fill(rows.view(-1, *[1] * (c.dim() - 1)), 0) for c in state.columns), ranking)

    def update(self, state: MemoryState, columns: tuple[Tensor, ...], position: Int[Tensor, "b n"]) -> MemoryState:
        """Return the state with the best of old and new entries; position -1 is no entry."""
        writes, ranking = self.select_slots(state.ranking, columns, position)
        return MemoryState(tuple(map(writes.apply, state.columns, columns)), ranking)

    def overwrite(self, state: MemoryState, columns: tuple[Tensor, ...], position: Int[Tensor, "b n"]) -> MemoryState:
        """Return the state that ``update`` returns, written into the tensors of ``state``; only new entries are copied."""
        writes, ranking = self.select_slots(state.ranking, columns, position)
        return MemoryState(tuple(map(writes.apply_, state.columns, columns)), ranking)

    def fit(self, state: MemoryState) -> MemoryState:
        """Return a state of another size as one of this size: its best entries, or all of them and empty slots."""
        old = state.ranking
        score = self.policy.compete(old.position, old.score, self.size)
        # Entries move to the first slots, in order: a memory of another size has no use for their places.
        kept = keep_mask(old.position, score, self.size, self.policy.newest_first)
        source, empty = first_true(kept, self.size), self.empty(state.columns)
        slot = torch.arange(source.shape[1], device=source.device).expand_as(source)
        writes = SlotWrites.of(slot, source, kept.gather(1, source), self.size, kept.shape[1])
        moved = {name: writes.apply_(getattr(empty.ranking, name), getattr(old, name)) for name in BY_SLOT}
        return MemoryState(tuple(map(writes.apply_, empty.columns, state.columns)), old._replace(**moved))

    def select_slots(
        self, old: Ranking, columns: tuple[Tensor, ...], position: Int[Tensor, "b n"]
    ) -> tuple[SlotWrites, Ranking]:
        """Return the new entries to write, their slots, and the ranking after that."""
        score = self.policy.enter(columns, old, position).masked_fill(position < 0, -torch.inf)
        candidates = torch.cat([old.position, position], 1)
        competing = self.policy.compete(candidates, torch.cat([old.score, score], 1), self.size)
        return keep_best(old, candidates, competing, score, self.policy.newest_first)


def keep_best(
    old: Ranking,
    candidates: Int[Tensor, "b c"],
    competing: Float[Tensor, "b c"],
    score: Float[Tensor, "b n"],
    newest_first: bool,
) -> tuple[SlotWrites, Ranking]:
    """Return the new entries to write, their slots, and the ranking after that.

    The last n ``candidates`` are the positions of new entries, which enter with ``score``; the others are in the slots of the
    memory, -1 if empty. Those of the lowest ``competing`` scores go until the rest fits, of equal ones the oldest, or the
    newest without ``newest_first``.
    """
    (_, size), new = old.position.shape, score.shape[1]
    stays, enters = keep_mask(candidates, competing, size, newest_first).split([size, new], 1)
    slot, source = first_true(~stays, min(new, size)), first_true(enters, min(new, size))
    writes, position = SlotWrites.of(slot, source, enters.gather(1, source), size, new), candidates[:, size:]
    ranking = Ranking(
        writes.apply(old.position, position),
        writes.apply(old.score, score),
        writes.apply(old.attended, torch.zeros_like(position, dtype=torch.bool)),
        old.clock,
        old.written + (position >= 0).sum(1),
    )
    return writes, ranking


def keep_mask(position: Int[Tensor, "b c"], score: Tensor, size: int, newest_first: bool) -> Bool[Tensor, "b c"]:
    """Return the candidates to keep: those of the best scores, of equal ones the newest or the oldest, no empty ones."""
    filled = position >= 0
    if int(filled.sum(1).max()) <= size:  # nothing is evicted, so nothing need be sorted
        return filled
    by_age = (position if newest_first else -position).argsort(1, descending=True)
    order = by_age.gather(1, score.gather(1, by_age).argsort(dim=1, descending=True, stable=True))
    return torch.zeros_like(position, dtype=torch.bool).scatter(1, order[:, :size], True) & filled


class SlotWrites(NamedTuple):
    """Writes of new entries to slots, both numbered over all rows; where ``valid`` is false the slot stays as it is."""

    slot: Int[Tensor, " w"]
    source: Int[Tensor, " w"]
    valid: Bool[Tensor, " w"] | None  # None: all

    @classmethod
    def of(
        cls, slot: Int[Tensor, "b n"], source: Int[Tensor, "b n"], valid: Bool[Tensor, "b n"], size: int, new: int
    ) -> SlotWrites:
        """Return the writes of rows with ``size`` slots and ``new`` entries."""
        row = torch.arange(len(slot), device=slot.device)[:, None]
        slot, source = size * row + slot, new * row + source
        if slot.device.type != "cpu":  # how many are valid is not known there without waiting
            return cls(slot.flatten(), source.flatten(), valid.flatten())
        return cls(slot.flatten(), source.flatten(), None) if valid.all() else cls(slot[valid], source[valid], None)

    def split(self, groups: int, slots: int, entries: int) -> list[SlotWrites]:
        """Return the writes to each group of rows, which has this number of slots and of new entries."""
        if self.valid is None:
            counts = torch.bincount(self.source // entries, minlength=groups).tolist()
        else:
            counts = [len(self.source) // groups] * groups
        place, entry = (self.slot % slots).split(counts), (self.source % entries).split(counts)
        valid = [None] * groups if self.valid is None else self.valid.split(counts)
        return [SlotWrites(*columns) for columns in zip(place, entry, valid, strict=True)]

    def apply(self, old: Tensor, new: Tensor) -> Tensor:
        """Return a copy of a column [b m ...] with the new entries [b n ...] written to it."""
        return self.apply_(old.clone(), new)

    def apply_(self, old: Tensor, new: Tensor) -> Tensor:
        """Write the new entries to a column in place, and return it."""
        slots = old.view(-1, *old.shape[2:]) if old.numel() else old.flatten(0, 1)
        value = new.flatten(0, 1).index_select(0, self.source).to(old.dtype)  # new entries may be of half precision
        if self.valid is not None:
            value = torch.where(self.valid.view(-1, *[1] * (value.dim() - 1)), value, slots.index_select(0, self.slot))
        slots.index_copy_(0, self.slot, value)
        return old


def first_true(mask: Bool[Tensor, "b n"], count: int) -> Int[Tensor, "b _"]:
    """Return ``count`` indices of each row, those of true elements before all others, each group in order."""
    return (~mask).byte().argsort(dim=1, stable=True)[:, :count]


def take_slots(column: Tensor, index: Int[Tensor, "b n"]) -> Tensor:
    """Return the entries [b n ...] of a column [b m ...] at an index."""
    if column.dim() == 2:
        return column.gather(1, index)
    b, m = column.shape[:2]
    rows = m * torch.arange(b, device=index.device)[:, None]  # copies whole entries, where gather copies single numbers
    return column.flatten(0, 1).index_select(0, (rows + index).flatten()).unflatten(0, index.shape)
