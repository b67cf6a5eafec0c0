"""The heads of keys of a layer, each with a memory of its own size: what AdaKV leaves of a layer that has read a whole text."""

from __future__ import annotations

import copy

import torch

from trime.common.types import Float, Int, Tensor
from trime.errors import UserError
from trime.kv.bounded import MemoryState
from trime.kv.layer_memory import Columns, LayerMemory, OwnAttention, numbered, state_of


class HeadMemories(LayerMemory):
    """A layer whose heads, each a ``LayerMemory``, hold ``parts`` of different sizes; only what they keep takes room.

    A head reads on in chunks of at most a quarter of its entries.
    """

    def __init__(self, layer: LayerMemory, parts: list[LayerMemory]):
        vars(self).update(vars(layer))
        self.layer, self.parts, self.full, self.filling = layer, parts, None, None

    @classmethod
    def of(cls, layer: LayerMemory, states: list[MemoryState]) -> HeadMemories:
        """Return a layer's heads with these entries, a state for each."""
        parts = []
        for state in states:
            size, part = state.ranking.position.shape[1], copy.copy(layer)
            part.memory, part.chunk = layer.memory.of_size(size), max(1, min(layer.chunk, size // 4))
            part.heads, part.is_plain = 1, layer.model_rotates and not layer.records
            part.full, part.filling = state, None
            parts.append(part)
        emptied = copy.copy(layer)
        emptied.reset()
        return cls(emptied, parts)

    @classmethod
    def split(cls, layer: LayerMemory, size: int, shares: list[int]) -> HeadMemories:
        """Return the heads of a layer of ``size`` entries that has read one text with more room, each with its best entries."""
        keys, rows = layer.memory.keys, [layer.state.take_rows(torch.tensor([head])) for head in range(len(shares))]
        other = copy.copy(layer)
        other.memory = layer.memory.of_size(size)
        return cls.of(other, [keys.of_size(share).fit(row) for row, share in zip(rows, shares, strict=True)])

    @classmethod
    def taken(cls, layer: LayerMemory, tensors: dict[str, Tensor], device: torch.device) -> HeadMemories:
        """Return the heads whose ``tensors`` were saved."""
        return cls.of(layer, [state_of(numbered(tensors, head), device) for head in range(layer.heads)])

    @property
    def rows(self) -> int:
        return self.parts[0].rows

    @property
    def columns(self) -> list[Tensor]:
        return [column for part in self.parts for column in part.columns]

    def positions(self) -> Int[Tensor, "b m"]:
        return torch.cat([part.positions() for part in self.parts], 1)

    def read(
        self, columns: Columns, position: Int[Tensor, "b l"], has_padding: bool, own: OwnAttention | None
    ) -> Float[Tensor, "b l h d"]:
        of_heads = zip(*(column.chunk(len(self.parts), 2) for column in columns), strict=True)
        read = [part.read((q, k, v), position, has_padding, own) for part, (q, k, v) in zip(self.parts, of_heads, strict=True)]
        return torch.cat(read, 2)

    def take_rows(self, rows: Int[Tensor, " r"]) -> None:
        for part in self.parts:
            part.take_rows(rows)

    def resize(self, size: int) -> None:
        """Give every head as much more room as the layer gets; UserError for less, as a part has its size already."""
        more = size - self.memory.keys.size
        if more < 0:
            raise UserError("the heads of this cache have shared their room already: make another cache for another text")
        self.memory = self.memory.of_size(size)
        for part in self.parts:
            part.resize(part.memory.keys.size + more)

    def with_room(self, tokens: int) -> HeadMemories:
        return self.with_parts([part.with_room(tokens) for part in self.parts])

    def take_scores(self, larger: LayerMemory) -> None:
        assert isinstance(larger, HeadMemories)
        for part, other in zip(self.parts, larger.parts, strict=True):
            part.take_scores(other)

    def forget(self, length: Int[Tensor, " b"]) -> None:
        for part in self.parts:
            part.forget(length)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{head} {name}": tensor for head, part in enumerate(self.parts) for name, tensor in part.tensors().items()}

    def __copy__(self) -> HeadMemories:
        other = self.with_parts([copy.copy(part) for part in self.parts])
        other.layer = copy.copy(self.layer)  # which reads the next text
        return other

    def with_parts(self, parts: list[LayerMemory]) -> HeadMemories:
        """Return this layer, at its present size, with other memories of its heads."""
        other = HeadMemories(self.layer, parts)
        other.memory = self.memory
        return other
