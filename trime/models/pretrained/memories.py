"""The memories of all layers, and what is done with all of them at once: copies of rows, sizes, guidance by a question."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from trime.common.types import Float, Int, Tensor
from trime.memory.slots.bounded import MemoryState
from trime.models.layers.attention import AttentionTrace
from trime.models.pretrained.attendre import scored_as
from trime.models.pretrained.layer_memory import Columns, Decoding, LayerMemory, OwnAttention, repeated


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
            return self.memories[index].decode(columns, self.decoding, index, own)
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

    def with_layers(self, layers: list[LayerMemory]) -> LayerMemories:
        """Return memories that have read the same text, of these layers."""
        other = copy.copy(self)
        other.memories, other.decoding = layers, None
        return other

    def fork(self, rows: Int[Tensor, " r"]) -> LayerMemories:
        """Return memories of these rows; what either reads from now on is its own."""
        other = self.with_layers([copy.copy(layer) for layer in self.apart()])
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
        for layer, size in zip(self.apart(), sizes, strict=True):
            layer.resize(size)

    def look_back(self, tokens: int, read: Callable[[LayerMemories], object]) -> None:
        """Let ``tokens`` of a question attend to all entries, and take the scores that these have after it.

        ``read`` lets other memories read the question, which have room for it: it evicts nothing, and is forgotten.
        """
        other = self.with_layers([layer.with_room(tokens) for layer in self.apart()])
        read(other)
        for layer, larger in zip(self.memories, other.apart(), strict=True):
            layer.full = scored_as(layer.state, larger.state)
