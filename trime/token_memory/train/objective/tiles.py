"""The tiles of a product of queries and memory, and the interface of the kernels that compute one tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from trime.common.types import Bool, Contexts, Float, Tensor, TokenPosition
from trime.token_memory.train.visibility import Extent, Visibility

TargetAndTotal = Sequence[Float[Tensor, "t all"]]  # of target and total


class Tile(NamedTuple):
    """Rows of queries, columns of memory, and the mask of columns that rows see; None: all."""

    row: slice
    column: slice
    visible: Bool[Tensor, "n m"] | None
    both: bool = False  # the columns are queries to the rows too
    back: Bool[Tensor, "n m"] | None = None  # what they see of the rows


class Tiles:
    """The tiles over queries and memory in which something is visible."""

    def __init__(self, query: Contexts, memory: Contexts, visibility: Visibility, block: int, symmetric: bool):
        self.query, self.memory, self.visibility, self.symmetric = query, memory, visibility, symmetric
        self.rows, self.row_extents = slices(len(query.token), block), extents(query.positions, block)
        self.columns, self.column_extents = self.rows, self.row_extents
        if query is not memory:
            self.columns, self.column_extents = slices(len(memory.token), block), extents(memory.positions, block)

    def __iter__(self) -> Iterator[Tile]:
        for row in range(len(self.rows)):
            for column in range(row + 1 if self.symmetric else len(self.columns)):
                # Of a symmetric product only the lower triangle is computed; its tiles serve both sides where both see.
                seen = self.sees_some(row, column)
                seen_back = self.symmetric and column < row and self.sees_some(column, row)
                if seen and seen_back:
                    back = self.mask(column, row)
                    back = None if back is None else back.T.contiguous()
                    yield Tile(self.rows[row], self.columns[column], self.mask(row, column), True, back)
                elif seen_back:
                    yield Tile(self.rows[column], self.columns[row], self.mask(column, row))
                elif seen:
                    yield Tile(self.rows[row], self.columns[column], self.mask(row, column))

    def sees_some(self, row: int, column: int) -> bool:
        return not self.visibility.rules_out(self.row_extents[row], self.column_extents[column])

    def mask(self, row: int, column: int) -> Bool[Tensor, "n m"] | None:
        """Return the mask of the entries of a block of memory that a block of queries sees; None: all."""
        if self.visibility.shows_all(self.row_extents[row], self.column_extents[column]):
            return None
        return self.visibility.sees(self.query.positions.take(self.rows[row]), self.memory.positions.take(self.columns[column]))


def slices(length: int, block: int) -> list[slice]:
    """Return consecutive slices of at most ``block`` elements."""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def extents(positions: TokenPosition, block: int) -> list[Extent]:
    """Return the extent of each block of positions, with a single transfer to the host."""
    if not len(positions.segment):
        return []
    count = -(-len(positions.segment) // block)
    row = torch.arange(count * block, device=positions.segment.device).clamp_(max=len(positions.segment) - 1)
    bounds = torch.stack(positions)[:, row].view(3, count, block).aminmax(dim=2)
    return [Extent(*zip(low, high, strict=True)) for low, high in torch.stack(bounds).permute(2, 0, 1).tolist()]
