"""The memory of one layer: a step inserts a chunk's entries, lets queries attend, and shows the policy what they saw.

Both readers of pretrained models use it: transformers' own layers (``evicting_cache``), and layers that are split at their
attention so that queries can wait (``reader``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn import functional as F

from trime.common.types import AttentionBlock, Bool, Float, Int, Ranking, Tensor
from trime.kv.attendre import HALF, Attendre, copy_scores_from
from trime.kv.bounded import MemoryState, SlotWrites
from trime.kv.filling import DotProducts, Filling, Queries
from trime.kv.recall.store import EntryStore, Recall, RecallQuery
from trime.layers.attention import AttentionTrace, hide_
from trime.layers.topk_attention import masked_softmax

Columns = tuple[Tensor, Tensor, Tensor]  # queries [b l h d], keys and values [b l g d]
ASKING = 8  # of the last queries of a step, and of others, that choose what is recalled: all would cost as much as the layer
OwnAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # the model's, of [b _ _ d] and a mask


@runtime_checkable
class PositionScore(Protocol):
    """Scores of queries and keys at their positions, as LM-Infinite or a relative bias defines them."""

    def stored(self, key: Float[Tensor, "b l g d"], position: Int[Tensor, "b l"]) -> Float[Tensor, "b l g s"]:
        """Return keys as a memory stores them."""

    def __call__(self, query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
        """Return scores [b h q m] of queries [b q h d] at positions ``at`` and stored keys at positions ``of``."""


class Decoding:
    """The rankings of all layers as the rows of one, while full memories read token by token."""

    def __init__(self, memory: Attendre, states: list[MemoryState]):
        self.memory, self.layers = memory, len(states)
        self.ranking = Ranking(*(torch.cat(columns) for columns in zip(*(state.ranking for state in states), strict=True)))
        self.blocks: list[AttentionBlock] = []  # of the layers that have attended since the last token was inserted
        self.at: Tensor = states[0].ranking.position[:, :0]  # the position of the token
        self.writes: list[SlotWrites] = []  # where each layer has the token; nowhere where its position is -1
        self.positions: list[Tensor] = []  # of each layer's entries in the slots that are used
        self.has_gaps = False  # some of these are empty, or the token is padding

    def insert(self, position: Int[Tensor, "b 1"]) -> None:
        """Make room for the next token in all layers."""
        self.learn()
        memory, rows, self.at = self.memory.keys, len(position), position.to(self.ranking.clock.device)
        # One call for all layers: one for each would cost more than the attention.
        writes, self.ranking = memory.select_slots(self.ranking, (), self.at.repeat(self.layers, 1))
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
        self.learn()
        return [Ranking(*columns) for columns in zip(*(column.chunk(self.layers) for column in self.ranking), strict=True)]


class LayerMemory:
    """The entries of a layer and their ranking; until it is full, and where nothing else is asked for, a plain ``Filling``.

    ``chunk``: tokens that are read in one step. ``score``: how queries see keys at their positions; None if the model rotates
    both, so that its own attention can read the entries. ``heads``: the number of heads of keys if each evicts for itself, as a
    row of the memory (Attendre footnote 2); 1 if they evict together. ``records``: the attention of the last step is kept.
    ``recall``: each step's queries also attend to the best of what is not in the memory any more.
    """

    def __init__(
        self,
        memory: Attendre,
        chunk: int,
        score: PositionScore | None = None,
        heads: int = 1,
        records: bool = False,
        recall: Recall | None = None,
    ):
        self.memory, self.chunk, self.heads, self.records = memory, chunk, heads, records
        sees_more = memory.window is None or memory.window > memory.keys.size
        self.recall = recall if sees_more else None  # nothing beyond the window can be seen
        self.score, self.model_rotates = score or DotProducts(), score is None
        self.products = self.score if isinstance(self.score, DotProducts) else DotProducts()
        self.is_plain = self.model_rotates and heads == 1 and not records  # the model's own attention could read it
        self.reset()

    def reset(self) -> None:
        self.filling = Filling(self.memory, self.chunk, self.products) if self.is_plain else None
        self.full: MemoryState | None = None  # the entries where this is not a filling
        self.store = EntryStore(self.recall) if self.recall else None
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
            if self.store is not None:
                self.store.write(*self.filling.entries)
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
        """Insert the entries of a chunk, then let queries attend; return what they attend to and their positions."""
        (query, key, value), position = self.folded(columns, position)
        entries, queries = (self.score.stored(key, position), value), Queries(query, position)
        state = self.state if self.rows else self.memory.keys.empty(entries)
        if self.store is not None:
            self.store.write(*entries, position)
        write = self.memory.keys.update if torch.is_grad_enabled() else self.memory.keys.overwrite
        self.full = write(state, entries, position)
        self.filling = None
        # Queries that have waited longest attend, and may see entries of later chunks (Attendre Figure 1).
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

    def decode(self, columns: Columns, decoding: Decoding, index: int, own: OwnAttention | None) -> Float[Tensor, "b 1 h d"]:
        """Insert the entry of a token for which all layers have made room together; return what its query attends to."""
        (query, key, value), _ = self.folded(columns, decoding.at[:: self.heads])
        entries = self.score.stored(key, decoding.at), value
        for old, new in zip(self.state.columns, entries, strict=True):
            decoding.writes[index].apply_(old, new)
        if self.store is not None:
            self.store.write(*entries, decoding.at)
        attended, block = self.look(Queries(query, decoding.at), decoding.positions[index], decoding.has_gaps, own)
        if block is not None:
            decoding.blocks.append(block)
        return attended.to(columns[0].dtype)

    def look(
        self, queries: Queries, of: Int[Tensor, "b n"], has_gaps: bool, own: OwnAttention | None
    ) -> tuple[Float[Tensor, "_ q h d"], AttentionBlock | None]:
        """Return the attention to entries at ``of``, and the scores, unless the model's ``own`` attention can read."""
        (query, at), held = queries, of.shape[1]
        key, value = (column[:, :held] for column in self.state.columns)
        sees_all = at.shape[1] == 1 and self.memory.window is None and not has_gaps
        own = own if self.is_plain and self.memory.top_k is None else None
        needs_mask = self.store is not None or (own is not None and not sees_all)
        visible = self.memory.visible(at, of) if needs_mask else None
        block = None if own is None else self.observed(queries, key, of, visible)
        if visible is not None and self.store is not None and (recalled := self.recalled(queries, key, of, visible)):
            key, value, of = (torch.cat(pair, 1) for pair in zip((key, value, of), recalled, strict=True))
            visible, sees_all = torch.cat([visible, self.memory.visible(at, recalled[2])], -1), False
        if own is not None:
            # Padding sees all, since attention to nothing is not a number.
            mask = visible if visible is None or not has_gaps else visible | (at < 0)[:, None, :, None]
            return own(query, key, value, None if sees_all else mask), block
        result = self.memory.look((query, at, key, of), value, self.score, sees_all)
        if self.records and bool((at >= 0).any()):
            self.last = result.similarity[..., :held], of[:, :held], at
        values = result.values.transpose(1, 2)  # [b·g q h/g d], where each of g heads is a row
        values = values if self.heads == 1 else values.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2, 3)
        retrieved = None if result.retrieved is None else result.retrieved[..., :held]
        return values, AttentionBlock(result.logits[..., :held], at, retrieved)

    def observed(
        self,
        queries: Queries,
        key: Float[Tensor, "b m g s"],
        of: Int[Tensor, "b m"],
        visible: Bool[Tensor, "b 1 q m"] | None,
    ) -> AttentionBlock | None:
        """Return the logits of those queries that the policy looks at: where the last ones decide, of no others."""
        policy = self.memory.keys.policy
        if not policy.uses_attention:
            return None
        newest = policy.observes if policy.observes and not bool((queries.position < 0).any()) else queries.position.shape[1]
        query, at = (column[:, -newest:] for column in queries)
        logits = self.score(query, at, key, of)
        if visible is not None:
            hide_(logits, ~visible[:, :, -newest:])
        return AttentionBlock(logits, at)

    @staticmethod
    def asking(count: int) -> Int[Tensor, " n"]:
        """Return the numbers of the queries that choose what all of a step get back: the last, and as many before them."""
        if count < 2 * ASKING:
            return torch.arange(count)
        return torch.cat([torch.linspace(0, max(count - ASKING, 0), ASKING).long(), torch.arange(count)[-ASKING:]]).unique()

    def recalled(
        self, queries: Queries, key: Float[Tensor, "b m g s"], of: Int[Tensor, "b m"], visible: Bool[Tensor, "b 1 q m"]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return keys, values and positions of what queries get back beside entries at ``of``; None where that is nothing."""
        asking = self.asking(queries.position.shape[1])
        query, at = (column[:, asking] for column in queries)
        local = hide_(self.score(query, at, key, of), ~visible[:, :, asking]).logsumexp(-1)
        assert self.store is not None
        return self.store.best(RecallQuery(query, at, local), of, self.score, self.products.scale_of(query))

    def read(
        self, columns: Columns, position: Int[Tensor, "b l"], has_padding: bool, own: OwnAttention | None
    ) -> Float[Tensor, "b l h d"]:
        """Insert entries and return what their queries attend to, chunk by chunk.

        ``own`` is the model's attention; None where it cannot be called, and the memory's own attention reads.
        """
        length = position.shape[1]
        if self.filling is not None and self.filling.takes(length):
            self.filling.append(*columns, position)
            keys, values, of = self.filling.entries
            if own is None:
                pairs = columns[0], position, keys, of
                return self.memory.look(pairs, values, self.score).values.transpose(1, 2).to(columns[0].dtype)
            return own(columns[0], keys, values, self.filling.mask(position, has_padding))
        if length <= self.chunk:
            return self.step(columns, position, has_padding, own)[0].to(columns[0].dtype)
        inputs, back = [*columns, position], None
        if has_padding:  # goes to the end, so that the chunks of a row are those that it has without the other rows
            order = (position < 0).byte().argsort(dim=1, stable=True)
            rows, back = torch.arange(len(order), device=order.device)[:, None], order.argsort(1)
            inputs = [column[rows, order] for column in inputs]
        chunks = zip(*(column.split(self.chunk, 1) for column in inputs), strict=True)
        attended = torch.cat([self.step((q, k, v), at, has_padding, own)[0] for q, k, v, at in chunks], 1)
        return (attended if back is None else attended[rows, back]).to(columns[0].dtype)

    def folded(self, columns: Columns, position: Int[Tensor, "b l"]) -> tuple[Columns, Int[Tensor, "n l"]]:
        """Return columns and positions as the memory takes them: each head of keys a row if it evicts for itself."""
        tensors: Sequence[Tensor] = columns
        if not self.model_rotates:  # half precision is slow on the CPU
            tensors = [x.float() if x.device.type == "cpu" and x.dtype in HALF else x for x in columns]
        if self.heads > 1:  # [b l h d] becomes [b·g l h/g d]: a row for each of g heads of keys with the queries that share it
            tensors = [x.unflatten(2, (self.heads, -1)).transpose(1, 2).flatten(0, 1) for x in tensors]
        query, key, value = tensors
        return (query, key, value), repeated(position, self.heads)

    def take_rows(self, rows: Int[Tensor, " r"]) -> None:
        """Continue with copies of these rows; repeats allowed."""
        if self.filling is not None and self.filling.count:
            self.filling.take_rows(rows.to(self.filling.columns[0].device))
        of_heads = (self.heads * rows[:, None] + torch.arange(self.heads, device=rows.device)).flatten()
        if self.store is not None:
            self.store.take_rows(of_heads)
        if self.full is None:
            return
        of_heads = of_heads.to(self.full.ranking.clock.device)
        self.full, self.waiting = self.full.take_rows(of_heads), self.waiting and self.waiting.take_rows(of_heads)

    @property
    def filled(self) -> int:
        """The number of entries of the row that holds most."""
        return int((self.state.ranking.position >= 0).sum(1).max())

    def resize(self, size: int) -> None:
        """Go on with another size: of a smaller one, the policy's best entries stay."""
        full = self.state if self.rows else None
        self.memory = self.memory.of_size(size)
        if full is None:
            self.reset()
        else:
            self.full = self.memory.keys.fit(full)

    def with_room(self, tokens: int) -> LayerMemory:
        """Return a memory of copies of the entries, with slots for further ``tokens``, which are read in one step."""
        state, other = self.state, copy.copy(self)
        other.memory, other.chunk, other.records = self.memory.with_room(tokens), tokens, False
        other.store = None  # a question that guides eviction is not kept
        other.full = other.memory.keys.fit(state)
        return other

    def take_scores(self, larger: LayerMemory) -> None:
        """Take the scores that the entries have in a memory that is a copy of this, with room for more."""
        self.full = copy_scores_from(self.state, larger.state)

    def forget(self, length: Int[Tensor, " b"]) -> None:
        """Forget each row's entries from position ``length`` on: their slots are empty then."""
        old, length = self.state.ranking, repeated(length, self.heads)
        if self.store is not None:
            self.store.forget(length)
        gone = old.position >= length[:, None]
        ranking = old._replace(
            position=old.position.masked_fill(gone, -1),
            score=old.score.masked_fill(gone, -torch.inf),
            attended=old.attended & ~gone,
            clock=torch.minimum(old.clock, length - 1),
        )
        self.full = self.state._replace(ranking=ranking)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state from which ``take`` goes on with the text that was read."""
        other = copy.copy(self)
        state = other.state
        columns = {"key": state.columns[0], "value": state.columns[1], **state.ranking._asdict()}
        return columns | ({} if other.store is None else other.store.tensors())

    def take(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Go on with a text that another memory of the same settings has read."""
        self.reset()
        self.memory = self.memory.of_size(tensors["key"].shape[1])
        self.full, self.filling = state_of(tensors, device), None
        if self.store is not None:
            self.store.take(tensors, device)

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
        other.filling, other.store = copy.copy(self.filling), copy.copy(self.store)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerMemory:
        """Return a memory with entries of its own, which belong to no gradient; the policy is the same."""
        other = copy.copy(self)
        with torch.no_grad():
            other.take_rows(torch.arange(self.rows))
        return other


class LayerMemories:
    """The memories of a model's layers, in order; all have the same policy."""

    def __init__(self, memories: list[LayerMemory]):
        self.memories, self.decoding = memories, None  # type: list[LayerMemory], Decoding | None

    @property
    def rows(self) -> int:
        """The number of texts that were read; 0 before the first."""
        return self.memories[0].rows

    @property
    def bytes(self) -> int:
        """The bytes of all layers on the device: entries, empty slots included, and the keys of blocks to recall."""
        entries = sum(column.nbytes for layer in self.memories for column in layer.columns)
        return entries + sum(layer.store.described_bytes for layer in self.memories if layer.store is not None)

    @property
    def stored_bytes(self) -> int:
        """The size of what can be recalled, of all layers, in bytes; it is in main memory or on disk."""
        return sum(layer.store.bytes for layer in self.memories if layer.store is not None)

    @property
    def are_alike(self) -> bool:
        """Whether one ranking can hold those of all layers; it cannot where scores depend on a layer's keys."""
        first = self.memories[0].memory
        shape = {(layer.memory.keys.size, layer.memory.top_k is None) for layer in self.memories}
        return len(shape) == 1 and not first.keys.policy.needs_keys

    def positions(self, layer: int) -> Int[Tensor, "b m"]:
        """Return the positions of a layer's entries, -1 for empty slots: what it still remembers of the text."""
        return self.with_separate_rankings()[layer].positions()

    def kept(self) -> list[Int[Tensor, "b m"]]:
        return [layer.positions() for layer in self.with_separate_rankings()]

    def traces(self) -> list[AttentionTrace]:
        """Return the attention of the last query of each layer, where it is recorded."""
        traces = (layer.trace() for layer in self.memories)
        return [trace for trace in traces if trace is not None]

    def begin(self, position: Int[Tensor, "b l"], has_padding: bool) -> None:
        """Prepare the layers for tokens at these positions, -1 for padding, which they read one after another."""
        self.position, self.has_padding = position, has_padding
        if position.shape[1] > 1 or torch.is_grad_enabled() or not self.are_alike:
            self.with_separate_rankings()
            return
        if self.decoding is None:
            states = [layer.full for layer in self.memories if layer.full is not None]
            if len(states) < len(self.memories) or len({state.ranking.clock.device for state in states}) > 1:
                return
            self.decoding = Decoding(self.memories[0].memory, states)
        self.decoding.insert(repeated(position, self.memories[0].heads))

    def attend(self, index: int, columns: Columns, own: OwnAttention | None) -> Float[Tensor, "b l h d"]:
        """Insert a layer's entries and return what its queries attend to (see ``LayerMemory.read``)."""
        if self.decoding is not None:
            return self.memories[index].decode(columns, self.decoding, index, own)
        return self.memories[index].read(columns, self.position.to(columns[0].device), self.has_padding, own)

    def with_separate_rankings(self) -> list[LayerMemory]:
        """Return the layers, each with a ranking of its own, also where the last token was decoded by all together."""
        if self.decoding is not None:
            for layer, ranking in zip(self.memories, self.decoding.rankings(), strict=True):
                layer.full = layer.state._replace(ranking=ranking)
            self.decoding = None
        return self.memories

    def take_rows(self, rows: Int[Tensor, " r"]) -> None:
        """Continue with copies of these rows, in this order; repeats allowed."""
        for layer in self.with_separate_rankings():
            layer.take_rows(rows)

    def with_layers(self, layers: list[LayerMemory]) -> LayerMemories:
        """Return memories that have read the same text, of these layers."""
        other = copy.copy(self)
        other.memories, other.decoding = layers, None
        return other

    def fork(self, rows: Int[Tensor, " r"]) -> LayerMemories:
        """Return memories of these rows; what either reads from now on is its own."""
        other = self.with_layers([copy.copy(layer) for layer in self.with_separate_rankings()])
        other.take_rows(rows)
        return other

    def holding(self, states: tuple[MemoryState, ...]) -> LayerMemories:
        """Return such memories with copies of these entries."""
        other = self.with_layers([copy.copy(layer) for layer in self.memories])
        for layer, state in zip(other.memories, states, strict=True):
            layer.full = state
        other.take_rows(torch.arange(other.rows))
        return other

    def resize(self, sizes: list[int]) -> None:
        """Give the layers other sizes: of a smaller one, its policy's best entries stay."""
        for layer, size in zip(self.with_separate_rankings(), sizes, strict=True):
            layer.resize(size)

    def extend(self, tokens: int) -> None:
        """Make room for further ``tokens``, such as an answer, so that they evict nothing."""
        for layer in self.with_separate_rankings():
            layer.resize(layer.memory.keys.size + tokens)

    def rescore_with_question(self, tokens: int, read: Callable[[LayerMemories], object]) -> None:
        """Let ``tokens`` of a question attend to all entries, and take the scores that these have after it."""
        # The copies have room for the question, so that it evicts nothing; they are forgotten, and only scores are taken over.
        other = self.with_layers([layer.with_room(tokens) for layer in self.with_separate_rankings()])
        read(other)
        for layer, larger in zip(self.memories, other.with_separate_rankings(), strict=True):
            layer.take_scores(larger)


def numbered(tensors: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a number, of a layer or a head, by what follows it."""
    first = f"{number} "
    return {name.removeprefix(first): tensor for name, tensor in tensors.items() if name.startswith(first)}


def state_of(tensors: dict[str, Tensor], device: torch.device) -> MemoryState:
    """Return the entries and their ranking that ``LayerMemory.tensors`` has named."""
    ranking = Ranking(*(tensors[name].to(device) for name in Ranking._fields))
    return MemoryState((tensors["key"].to(device), tensors["value"].to(device)), ranking)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Return [b ...] as [b·g ...]: each row as often as there are heads."""
    return x if heads == 1 else x.repeat_interleave(heads, 0)


def side_by_side(x: Tensor, heads: int) -> Tensor:
    """Return [b·g m] as [b g·m]: the slots of all heads of a row."""
    return x if heads == 1 else x.unflatten(0, (-1, heads)).flatten(1)
