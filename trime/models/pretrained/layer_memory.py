"""The memory of one layer: a step inserts the entries of a chunk, lets queries attend, and tells the policy what they saw.

Both readers of pretrained models use it: transformers' own layers (``evicting_cache``), and layers that are split at their
attention so that queries can wait (``reader``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn import functional as F

from trime.memory.bounded import BoundedMemory, MemoryState, SlotWrites
from trime.models.attendre import Attendre, AttendreState, AttentionOutput, Queries, Retrieved, scored_as
from trime.models.attention_trace import AttentionTrace
from trime.models.layers.rotary import dot_products
from trime.models.layers.topk_attention import masked_softmax
from trime.models.pretrained.filling import Filling, forgotten, seen_by
from trime.types import AttentionBlock, Float, Int, Tensor

Columns = tuple[Tensor, Tensor, Tensor]  # queries [b l h d], keys and values [b l g d]
OwnAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # the model's, of [b _ _ d] and a mask


@runtime_checkable
class PositionScore(Protocol):
    """Scores of queries and keys at their positions, as LM-Infinite or a relative bias defines them."""

    def stored(self, key: Float[Tensor, "b l g d"], position: Int[Tensor, "b l"]) -> Float[Tensor, "b l g s"]:
        """Return keys as a memory stores them."""

    def __call__(self, query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
        """Return scores [b h q m] of queries [b q h d] at positions ``at`` and stored keys at positions ``of``."""


class DotProducts:
    """Scores of queries and keys that the model itself has rotated to their positions."""

    def stored(self, key: Tensor, position: Tensor) -> Tensor:
        return key

    def __call__(self, query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
        return dot_products(query, key)


class LayerMemory:
    """The entries of a layer and their ranking; until it is full, and where nothing else is asked for, a plain ``Filling``.

    ``chunk``: tokens that are read in one step. ``score``: how queries see keys at their positions; None if the model rotates
    both, so that its own attention can read the entries. ``heads``: the number of heads of keys if each evicts for itself, as a
    row of the memory (Attendre footnote 2); 1 if they evict together. ``records``: the attention of the last step is kept.
    """

    def __init__(self, memory: Attendre, chunk: int, score: PositionScore | None = None, heads: int = 1, records: bool = False):
        self.memory, self.chunk, self.heads, self.records = memory, chunk, heads, records
        self.score, self.model_rotates = score or DotProducts(), score is None
        self.reset()

    def reset(self) -> None:
        """Empty the memory, for another text."""
        starts_plain = self.model_rotates and self.heads == 1 and not self.records
        self.filling = Filling(self.memory, self.chunk) if starts_plain else None
        self.full: MemoryState | None = None  # the entries where this is not a filling
        self.waiting: Queries | None = None
        self.last: tuple[Retrieved, Int[Tensor, "b q"]] | None = None  # of the last step, with the positions of its queries

    @property
    def needs_scores(self) -> bool:
        """Whether something depends on the scores, so that the model's own attention cannot take the place of this one."""
        memory, plain = self.memory, self.model_rotates and self.heads == 1 and not self.records
        return not plain or memory.keys.policy.uses_attention or memory.top_k is not None

    @property
    def rows(self) -> int:
        """The number of texts that were read; 0 before the first."""
        if self.full is not None:
            return len(self.full.ranking.clock) // self.heads
        return len(self.filling.columns[0]) if self.filling is not None and self.filling.count else 0

    @property
    def state(self) -> MemoryState:
        """The entries and their ranking; a filling memory becomes one that evicts from now on."""
        if self.full is None:
            assert self.filling is not None and self.filling.count, "the memory has read nothing yet"
            self.full, self.filling = self.filling.state(), None
        return self.full

    def empty(self, nothing: Float[Tensor, "b 0 g d"]) -> MemoryState:
        """Return the state of rows that have read nothing, for keys and values like these."""
        (_, key, value), position = self.folded((nothing, nothing, nothing), torch.zeros(nothing.shape[:2]).long())
        return self.memory.keys.empty((self.score.stored(key, position.to(key.device)), value))

    def state_for(self, entries: tuple[Tensor, Tensor]) -> MemoryState:
        """Return the state, or an empty one for entries like these before the first."""
        return self.state if self.rows else self.memory.keys.empty(entries)

    @property
    def columns(self) -> list[Tensor]:
        """The tensors of keys and values, with the room that they have for more."""
        return [*self.full.columns] if self.full is not None else self.filling.columns[:2] if self.filling else []

    def positions(self) -> Int[Tensor, "b m"]:
        """Return the positions of the entries, -1 for empty slots; those of heads that evict for themselves side by side."""
        if self.filling is None or not self.filling.count:
            return side_by_side(self.state.ranking.position, self.heads)
        return F.pad(self.filling.position, (0, self.memory.keys.size - self.filling.count), value=-1)

    def step(self, columns: Columns, position: Int[Tensor, "b l"]) -> Float[Tensor, "b q h d"]:
        """Insert a chunk; return what the queries attend to that leave: all at once, unless the memory lets some wait."""
        (query, key, value), position = self.folded(columns, position)
        entries, queries = (self.score.stored(key, position), value), Queries((query,), position)
        waiting = queries.split(0)[0] if self.waiting is None else self.waiting
        state, overwrite = AttendreState(self.state_for(entries), waiting), not torch.is_grad_enabled()
        return self.after(*self.memory.step(state, entries, queries, self.score, overwrite))

    def release(self, count: int) -> Float[Tensor, "b q h d"]:
        """Return what the ``count`` queries attend to that have waited longest."""
        assert self.waiting is not None
        return self.after(*self.memory.release(AttendreState(self.state, self.waiting), count, self.score))

    def after(self, state: AttendreState, output: AttentionOutput) -> Float[Tensor, "b q h d"]:
        """Keep the state after a step, and return what its queries attended to."""
        self.full, self.waiting, self.filling = state.keys, state.queries, None
        if self.records and bool((output.position >= 0).any()):
            self.last = output.retrieved, output.position
        return unfolded(output.attended, self.heads)

    def read(
        self, columns: Columns, position: Int[Tensor, "b l"], has_padding: bool, own: OwnAttention
    ) -> Float[Tensor, "b l h d"]:
        """Insert entries and return what their queries attend to, chunk by chunk; ``own`` is the model's attention."""
        length = position.shape[1]
        if self.filling is not None and self.filling.takes(length):
            self.filling.append(*columns, position)
            return own(columns[0], self.filling.keys, self.filling.values, self.filling.mask(position, has_padding))
        if length <= self.chunk:
            return self.read_chunk(columns, position, has_padding, own)
        inputs, back = [*columns, position], None
        if has_padding:  # goes to the end, so that the chunks of a row are those that it has without the other rows
            order = (position < 0).byte().argsort(dim=1, stable=True)
            rows, back = torch.arange(len(order), device=order.device)[:, None], order.argsort(1)
            inputs = [part[rows, order] for part in inputs]
        chunks = zip(*(part.split(self.chunk, 1) for part in inputs), strict=True)
        attended = torch.cat([self.read_chunk((q, k, v), at, has_padding, own) for q, k, v, at in chunks], 1)
        return attended if back is None else attended[rows, back]

    def read_chunk(
        self, columns: Columns, at: Int[Tensor, "b l"], has_padding: bool, own: OwnAttention
    ) -> Float[Tensor, "b l h d"]:
        """Insert the entries of a chunk and return what their queries attend to."""
        query, key, value = columns
        if self.needs_scores:
            return self.step(columns, at).to(query.dtype)
        write = self.memory.keys.update if torch.is_grad_enabled() else self.memory.keys.overwrite
        self.full, self.filling = write(self.state_for((key, value)), (key, value), at), None
        of = self.full.ranking.position[:, : self.memory.used_slots(self.full.ranking)]
        entries = (column[:, : of.shape[1]] for column in self.full.columns)
        sees_all = at.shape[1] == 1 and self.memory.window is None and not has_padding and not bool((of < 0).any())
        return own(query, *entries, None if sees_all else seen_by(self.memory, at, of))

    def decode(
        self, columns: Columns, writes: SlotWrites, at: Int[Tensor, "b 1"], of: Int[Tensor, "b n"], has_gaps: bool
    ) -> tuple[Tensor, AttentionBlock]:
        """Return what one token attends to, and its scores, where a ranking of all layers has chosen its slot.

        ``at`` and ``of``: the positions of the token and of the entries in the slots that are used. ``has_gaps``: some are -1.
        """
        (query, key, value), _ = self.folded(columns, at[:: self.heads])
        stored, values = self.written((self.score.stored(key, at), value), writes, of.shape[1])
        sees_all = self.memory.window is None and not has_gaps
        logits, attended, retrieved = self.memory.look((query, at, stored, of), values, self.score, sees_all)
        if self.records:
            self.last = Retrieved(logits, retrieved, of, ()), at
        return unfolded(attended.transpose(1, 2), self.heads).to(columns[0].dtype), AttentionBlock(logits, at, retrieved)

    def written(self, entries: tuple[Tensor, Tensor], writes: SlotWrites, used: int) -> tuple[Tensor, Tensor]:
        """Write entries into the slots that were chosen for them, and return keys and values of the slots that are used."""
        keys, values = (writes.apply_(old, new)[:, :used] for old, new in zip(self.columns, entries, strict=True))
        return keys, values

    def folded(self, columns: Columns, position: Int[Tensor, "b l"]) -> tuple[Columns, Int[Tensor, "n l"]]:
        """Return columns and positions as the memory takes them: each head of keys a row if it evicts for itself."""
        parts = columns if self.model_rotates else map(float32_on_cpu, columns)
        query, key, value = (head_rows(part, self.heads) for part in parts)
        return (query, key, value), repeated(position, self.heads)

    def take_rows(self, rows: Int[Tensor, " r"]) -> None:
        """Continue with copies of these rows, each as often as it is named."""
        if self.filling is not None and self.filling.count:
            self.filling.take_rows(rows.to(self.filling.position.device))
        if self.full is None:
            return
        of_heads = (self.heads * rows[:, None] + torch.arange(self.heads, device=rows.device)).flatten()
        of_heads = of_heads.to(self.full.ranking.clock.device)
        self.full, self.waiting = self.full.take_rows(of_heads), self.waiting and self.waiting.take_rows(of_heads)

    def resize(self, size: int) -> None:
        """Go on with another size: of a smaller one, the policy's best entries stay."""
        full = self.state if self.rows else None
        self.memory = replace(self.memory, keys=BoundedMemory(size, self.memory.keys.policy))
        self.full = full and self.memory.keys.fit(full)

    def with_room(self, tokens: int) -> LayerMemory:
        """Return a memory of copies of the entries, with slots for so many tokens more, which are read in one step."""
        state, other = self.state, copy.copy(self)
        other.memory, other.chunk, other.records = self.memory.with_room(tokens), tokens, False
        other.full = other.memory.keys.fit(state)
        return other

    def take_scores(self, larger: LayerMemory) -> None:
        """Take the scores that the entries have in a memory ``with_room``."""
        self.full = scored_as(self.state, larger.state)

    def forget(self, length: Int[Tensor, " b"]) -> None:
        """Forget each row's entries from position ``length`` on."""
        if self.filling is not None:
            self.filling.forget(length)
        elif self.full is not None:
            self.full = self.full._replace(ranking=forgotten(self.full.ranking, repeated(length, self.heads)))

    def trace(self) -> AttentionTrace | None:
        """Return the attention of each row's last query; None where nothing was recorded."""
        if self.last is None:
            return None
        retrieved, position = self.last
        rows = torch.arange(len(position), device=position.device)
        weight = masked_softmax(retrieved.similarity)[rows, :, position.argmax(1)]
        share = side_by_side(weight.mean(1), self.heads) / self.heads
        return AttentionTrace(share, side_by_side(retrieved.position, self.heads))

    def __copy__(self) -> LayerMemory:
        """Return a memory of the same tensors: give it rows of its own before either reads on."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.filling = copy.copy(self.filling)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerMemory:
        """Return a memory with entries of its own, which belong to no gradient; the policy is the same."""
        other = copy.copy(self)
        with torch.no_grad():
            other.take_rows(torch.arange(self.rows))
        return other


def float32_on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor of half precision on the CPU in float32, in which attention is faster there; any other as it is."""
    return tensor.float() if tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def head_rows(x: Float[Tensor, "b l h d"], heads: int) -> Float[Tensor, "_ l _ d"]:
    """Return [b l h d] as [b·g l h/g d], a row for each of g heads of keys with the queries that share it."""
    return x if heads == 1 else x.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1)


def unfolded(x: Float[Tensor, "_ l _ d"], heads: int) -> Float[Tensor, "b l h d"]:
    """Return [b·g l h/g d] as [b l h d]."""
    return x if heads == 1 else x.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2, 3)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Return [b ...] as [b·g ...]: each row as often as there are heads."""
    return x if heads == 1 else x.repeat_interleave(heads, 0)


def side_by_side(x: Tensor, heads: int) -> Tensor:
    """Return [b·g m] as [b g·m]: the slots of all heads of a row."""
    return x if heads == 1 else x.unflatten(0, (-1, heads)).flatten(1)
