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

from trime.common.types import AttentionBlock, Float, Int, Ranking, Tensor
from trime.memory.slots.bounded import BoundedMemory, MemoryState, SlotWrites
from trime.models.layers.attention import AttentionTrace
from trime.models.layers.rotary import dot_products
from trime.models.layers.topk_attention import masked_softmax
from trime.models.pretrained.attendre import Attendre
from trime.models.pretrained.filling import Filling, Queries, seen_by

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


class Decoding:
    """The rankings of all layers as the rows of one, while full memories read token by token.

    Each token evicts an entry in every layer: one call chooses all of them, where a call for each layer would cost more than
    the attention. What a token's queries attend to changes the ranking when the next token is inserted.
    """

    def __init__(self, memory: Attendre, states: list[MemoryState]):
        self.memory, self.layers = memory, len(states)
        self.ranking = Ranking(*(torch.cat(parts) for parts in zip(*(state.ranking for state in states), strict=True)))
        self.blocks: list[AttentionBlock] = []  # of the layers that have attended since the last token was inserted
        self.at: Tensor = states[0].ranking.position[:, :0]  # the position of the token
        self.writes: list[SlotWrites] = []  # where each layer has the token; nowhere where its position is -1
        self.positions: list[Tensor] = []  # of each layer's entries in the slots that are used
        self.has_gaps = False  # some of these are empty, or the token is padding

    def insert(self, position: Int[Tensor, "b 1"]) -> None:
        """Make room for the next token in all layers."""
        self.learn()
        memory, rows, self.at = self.memory.keys, len(position), position.to(self.ranking.clock.device)
        writes, self.ranking = memory.plan(self.ranking, (), self.at.repeat(self.layers, 1))
        self.writes = writes.split(self.layers, rows * memory.size, rows)
        used = self.ranking.position[:, : self.memory.used_slots(self.ranking)]
        self.has_gaps = bool((used < 0).any()) or bool((self.at < 0).any())
        self.positions = list(used.chunk(self.layers))

    def learn(self) -> None:
        """Let the policy see the queries of all layers."""
        if not self.blocks:
            return
        score, position = (torch.cat([getattr(block, name) for block in self.blocks]) for name in ("score", "position"))
        hits = [block.retrieved for block in self.blocks if block.retrieved is not None]
        block = AttentionBlock(score, position, torch.cat(hits) if hits else None)
        self.ranking, self.blocks = self.memory.learn(self.ranking, block), []

    def rankings(self) -> list[Ranking]:
        """Return the ranking of each layer."""
        self.learn()
        return [Ranking(*parts) for parts in zip(*(column.chunk(self.layers) for column in self.ranking), strict=True)]


class LayerMemory:
    """The entries of a layer and their ranking; until it is full, and where nothing else is asked for, a plain ``Filling``.

    ``chunk``: tokens that are read in one step. ``score``: how queries see keys at their positions; None if the model rotates
    both, so that its own attention can read the entries. ``heads``: the number of heads of keys if each evicts for itself, as a
    row of the memory (Attendre footnote 2); 1 if they evict together. ``records``: the attention of the last step is kept.
    """

    def __init__(self, memory: Attendre, chunk: int, score: PositionScore | None = None, heads: int = 1, records: bool = False):
        self.memory, self.chunk, self.heads, self.records = memory, chunk, heads, records
        self.score, self.model_rotates = score or DotProducts(), score is None
        self.is_plain = self.model_rotates and heads == 1 and not records  # the model's own attention could read it
        self.reset()

    def reset(self) -> None:
        """Empty the memory, for another text."""
        self.filling = Filling(self.memory, self.chunk) if self.is_plain else None
        self.full: MemoryState | None = None  # the entries where this is not a filling
        self.waiting: Queries | None = None
        # Of the last step: similarities of what was retrieved, positions of the entries, and of the queries.
        self.last: tuple[Float[Tensor, "b h q m"], Int[Tensor, "b m"], Int[Tensor, "b q"]] | None = None

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

    @property
    def columns(self) -> list[Tensor]:
        """The tensors of keys and values, with the room that they have for more."""
        return [*self.full.columns] if self.full is not None else self.filling.columns[:2] if self.filling else []

    def positions(self) -> Int[Tensor, "b m"]:
        """Return the positions of the entries, -1 for empty slots; those of heads that evict for themselves side by side."""
        if self.filling is None or not self.filling.count:
            return side_by_side(self.state.ranking.position, self.heads)
        return F.pad(self.filling.entries[2], (0, self.memory.keys.size - self.filling.count), value=-1)

    def step(
        self, columns: Columns, position: Int[Tensor, "b l"], has_padding: bool = True, own: OwnAttention | None = None
    ) -> tuple[Float[Tensor, "b q h d"], Int[Tensor, "b q"]]:
        """Insert the entries of a chunk, then let queries attend; return what they attend to and their positions.

        Those are the queries of the chunk or, if ``query_size`` of them wait, as many that have waited longest. They may see
        entries of later chunks then (Attendre Figure 1).
        """
        (query, key, value), position = self.folded(columns, position)
        entries, queries = (self.score.stored(key, position), value), Queries(query, position)
        write = self.memory.keys.update if torch.is_grad_enabled() else self.memory.keys.overwrite
        self.full = write(self.state if self.rows else self.memory.keys.empty(entries), entries, position)
        self.filling = None
        if self.memory.query_size or self.waiting is not None:  # a delay line: all rows move in step, padding included
            self.waiting = queries if self.waiting is None else self.waiting.concat(queries)
            return self.release(max(0, self.waiting.position.shape[1] - self.memory.query_size))
        return self.attend_with(queries, has_padding, own)

    def release(self, count: int) -> tuple[Float[Tensor, "b q h d"], Int[Tensor, "b q"]]:
        """Let the ``count`` queries attend that have waited longest."""
        assert self.waiting is not None
        leaving, self.waiting = self.waiting.split(count)
        return self.attend_with(leaving)

    def attend_with(
        self, queries: Queries, has_padding: bool = True, own: OwnAttention | None = None
    ) -> tuple[Float[Tensor, "b q h d"], Int[Tensor, "b q"]]:
        """Let queries attend to the memory, and the policy see their scores."""
        ranking = self.state.ranking
        of = ranking.position[:, : self.memory.used_slots(ranking)]
        has_gaps = has_padding or (queries.position.shape[1] == 1 and bool((of < 0).any()))
        attended, block = self.look(queries, of, has_gaps, own)
        if block is not None:
            self.full = self.state._replace(ranking=self.memory.learn(ranking, block))
        return attended, queries.position[:: self.heads]

    def decode(self, columns: Columns, decoding: Decoding, index: int, own: OwnAttention) -> Float[Tensor, "b 1 h d"]:
        """Insert the entry of a token for which all layers have made room together; return what its query attends to."""
        (query, key, value), _ = self.folded(columns, decoding.at[:: self.heads])
        for old, new in zip(self.state.columns, (self.score.stored(key, decoding.at), value), strict=True):
            decoding.writes[index].apply_(old, new)
        attended, block = self.look(Queries(query, decoding.at), decoding.positions[index], decoding.has_gaps, own)
        if block is not None:
            decoding.blocks.append(block)
        return attended.to(columns[0].dtype)

    def look(
        self, queries: Queries, of: Int[Tensor, "b n"], has_gaps: bool, own: OwnAttention | None
    ) -> tuple[Float[Tensor, "_ q h d"], AttentionBlock | None]:
        """Return what queries attend to of the first entries, those at positions ``of``, and the scores, if they matter.

        ``own`` is the model's attention, which reads if they do not. ``has_gaps``: some queries or entries may be at
        position -1.
        """
        (query, at), (key, value) = queries, (column[:, : of.shape[1]] for column in self.state.columns)
        sees_all = at.shape[1] == 1 and self.memory.window is None and not has_gaps
        needs_scores = not self.is_plain or self.memory.keys.policy.uses_attention or self.memory.top_k is not None
        if own is not None and not needs_scores:
            return own(query, key, value, None if sees_all else seen_by(self.memory, at, of)), None
        result = self.memory.look((query, at, key, of), value, self.score, sees_all)
        if self.records and bool((at >= 0).any()):
            self.last = result.similarity, of, at
        return unfolded(result.values.transpose(1, 2), self.heads), AttentionBlock(result.logits, at, result.retrieved)

    def read(
        self, columns: Columns, position: Int[Tensor, "b l"], has_padding: bool, own: OwnAttention
    ) -> Float[Tensor, "b l h d"]:
        """Insert entries and return what their queries attend to, chunk by chunk; ``own`` is the model's attention."""
        length = position.shape[1]
        if self.filling is not None and self.filling.takes(length):
            self.filling.append(*columns, position)
            keys, values, _ = self.filling.entries
            return own(columns[0], keys, values, self.filling.mask(position, has_padding))
        if length <= self.chunk:
            return self.step(columns, position, has_padding, own)[0].to(columns[0].dtype)
        inputs, back = [*columns, position], None
        if has_padding:  # goes to the end, so that the chunks of a row are those that it has without the other rows
            order = (position < 0).byte().argsort(dim=1, stable=True)
            rows, back = torch.arange(len(order), device=order.device)[:, None], order.argsort(1)
            inputs = [part[rows, order] for part in inputs]
        chunks = zip(*(part.split(self.chunk, 1) for part in inputs), strict=True)
        attended = torch.cat([self.step((q, k, v), at, has_padding, own)[0] for q, k, v, at in chunks], 1)
        return (attended if back is None else attended[rows, back]).to(columns[0].dtype)

    def folded(self, columns: Columns, position: Int[Tensor, "b l"]) -> tuple[Columns, Int[Tensor, "n l"]]:
        """Return columns and positions as the memory takes them: each head of keys a row if it evicts for itself."""
        parts = columns if self.model_rotates else map(float32_on_cpu, columns)
        query, key, value = (head_rows(part, self.heads) for part in parts)
        return (query, key, value), repeated(position, self.heads)

    def take_rows(self, rows: Int[Tensor, " r"]) -> None:
        """Continue with copies of these rows, each as often as it is named."""
        if self.filling is not None and self.filling.count:
            self.filling.take_rows(rows.to(self.filling.columns[0].device))
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

    def forget(self, length: Int[Tensor, " b"]) -> None:
        """Forget each row's entries from position ``length`` on: their slots are empty then."""
        old, length = self.state.ranking, repeated(length, self.heads)
        gone = old.position >= length[:, None]
        ranking = old._replace(
            position=old.position.masked_fill(gone, -1),
            score=old.score.masked_fill(gone, -torch.inf),
            attended=old.attended & ~gone,
            clock=torch.minimum(old.clock, length - 1),
        )
        self.full = self.state._replace(ranking=ranking)

    def trace(self) -> AttentionTrace | None:
        """Return the attention of each row's last query; None where nothing was recorded."""
        if self.last is None:
            return None
        similarity, of, at = self.last
        weight = masked_softmax(similarity)[torch.arange(len(at), device=at.device), :, at.argmax(1)]
        return AttentionTrace(side_by_side(weight.mean(1), self.heads) / self.heads, side_by_side(of, self.heads))

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
