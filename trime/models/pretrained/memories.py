"""The memories of all layers, and what is done with all of them at once: copies of rows, sizes, guidance by a question.

A token that is decoded once all memories are full evicts an entry in every layer. Where the layers are alike, their rankings
are the rows of one, so that the choice costs one call and not one for each layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from trime.memory.bounded import MemoryState, SlotWrites
from trime.models.attendre import Attendre
from trime.models.attention_trace import AttentionTrace
from trime.models.pretrained.filling import seen_by
from trime.models.pretrained.layer_memory import Columns, LayerMemory, OwnAttention, repeated
from trime.types import AttentionBlock, Float, Int, Ranking, Tensor


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
        """The size of the entries of all layers in bytes, empty slots included."""
        return sum(column.nbytes for layer in self.memories for column in layer.columns)

    @property
    def are_alike(self) -> bool:
        """Whether one ranking can hold those of all layers; it cannot where scores depend on a layer's keys."""
        first = self.memories[0].memory
        shape = {(layer.memory.keys.size, layer.memory.top_k is None) for layer in self.memories}
        return len(shape) == 1 and not first.keys.policy.needs_keys

    def positions(self, layer: int) -> Int[Tensor, "b m"]:
        """Return the positions of a layer's entries, -1 for empty slots: what it still remembers of the text."""
        return self.apart()[layer].positions()

    def kept(self) -> list[Int[Tensor, "b m"]]:
        """Return the positions of the entries of every layer."""
        return [layer.positions() for layer in self.apart()]

    def traces(self) -> list[AttentionTrace]:
        """Return the attention of the last query of each layer, where it is recorded."""
        traces = (layer.trace() for layer in self.memories)
        return [trace for trace in traces if trace is not None]

    def begin(self, position: Int[Tensor, "b l"], has_padding: bool) -> None:
        """Prepare the layers for tokens at these positions, -1 for padding, which they read one after another."""
        self.position, self.has_padding = position, has_padding
        if position.shape[1] > 1 or torch.is_grad_enabled() or not self.are_alike:
            self.apart()
            return
        if self.decoding is None:
            states = [layer.full for layer in self.memories if layer.full is not None]
            if len(states) < len(self.memories) or len({state.ranking.clock.device for state in states}) > 1:
                return
            self.decoding = Decoding(self.memories[0].memory, states)
        self.decoding.insert(repeated(position, self.memories[0].heads))

    def attend(self, index: int, columns: Columns, own: OwnAttention) -> Float[Tensor, "b l h d"]:
        """Insert a layer's entries and return what its queries attend to (see ``LayerMemory.read``)."""
        if self.decoding is not None:
            return self.decoding.attend(self.memories[index], index, columns, own)
        return self.memories[index].read(columns, self.position.to(columns[0].device), self.has_padding, own)

    def apart(self) -> list[LayerMemory]:
        """Return the layers, each with a ranking of its own, also where the last token was decoded by all together."""
        if self.decoding is not None:
            for layer, ranking in zip(self.memories, self.decoding.rankings(), strict=True):
                layer.full = layer.state._replace(ranking=ranking)
            self.decoding = None
        return self.memories

    def take_rows(self, rows: Int[Tensor, " r"]) -> None:
        """Continue with copies of these rows, in this order, each as often as it is named."""
        for layer in self.apart():
            layer.take_rows(rows)

    def fork(self, rows: Int[Tensor, " r"]) -> LayerMemories:
        """Return memories of these rows; what either reads from now on is its own."""
        other = copy.copy(self)
        other.memories = [copy.copy(layer) for layer in self.apart()]
        other.take_rows(rows)
        return other

    def holding(self, states: tuple[MemoryState, ...]) -> LayerMemories:
        """Return such memories with copies of these entries."""
        other = copy.copy(self)
        other.memories = [copy.copy(layer) for layer in self.memories]
        for layer, state in zip(other.memories, states, strict=True):
            layer.full, layer.filling = state, None
        other.take_rows(torch.arange(other.rows))
        return other

    def resize(self, sizes: list[int]) -> None:
        """Give the layers other sizes: of a smaller one, its policy's best entries stay."""
        for layer, size in zip(self.apart(), sizes, strict=True):
            layer.resize(size)

    def look_back(self, tokens: int, read: Callable[[LayerMemories], object]) -> None:
        """Let ``tokens`` of a question attend to all entries, and take the scores that these have after it.

        ``read`` lets other memories read the question, which have room for it: it evicts nothing, and is forgotten.
        """
        other = copy.copy(self)
        other.memories = [layer.with_room(tokens) for layer in self.apart()]
        read(other)
        for layer, larger in zip(self.memories, other.apart(), strict=True):
            layer.take_scores(larger)


class Decoding:
    """The rankings of all layers as the rows of one, while full memories read token by token: each evicts once for all.

    What a token's queries attend to changes the ranking when the next token is inserted.
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

    def attend(self, layer: LayerMemory, index: int, columns: Columns, own: OwnAttention) -> Float[Tensor, "b 1 h d"]:
        """Write the token's entry into layer ``index``, and return what its query attends to."""
        of = self.positions[index]
        if layer.needs_scores:
            attended, block = layer.decode(columns, self.writes[index], self.at, of, self.has_gaps)
            self.blocks.append(block)
            return attended
        query, key, value = columns
        keys, values = layer.written((key, value), self.writes[index], of.shape[1])
        sees_all = layer.memory.window is None and not self.has_gaps
        return own(query, keys, values, None if sees_all else seen_by(layer.memory, self.at, of))

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
