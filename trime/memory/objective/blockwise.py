"""The mass of a memory for every query, tile by tile: no [n, m] tensor beyond a block, forward or backward.

With scores s_ij = g_i . g_j / divisor over visible j (TRIME Eq. 5, 6):

    total_i  = logsumexp_j s_ij
    target_i = logsumexp_(j: x_j = x_i) s_ij
    d s_ij   = exp(s_ij - total_i) d total_i + [x_j = x_i] exp(s_ij - target_i) d target_i

The forward pass stores 2 t n numbers; the backward pass computes the scores again. Memory is O((n + m) d + t n + t block^2).
Tiles that a visibility rules out are skipped. Where the queries are the memory, as in training, s is symmetric: one tile
serves its rows and its columns, so that forward and backward take 2 n^2 d multiplications instead of 4 n^2 d (the whole
matrix at once takes 3 n^2 d). The kernels of ``blockwise_cpu`` and ``blockwise_cuda`` are tested against the definition
below, which also computes the tiles that they decline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from trime.memory.objective import blockwise_cpu
from trime.memory.similarity import as_inner_products
from trime.memory.visibility import Extent, Visibility
from trime.types import Bool, Contexts, Float, Mass, Tensor, TokenPosition

BLOCK, CUDA_BLOCK = 1024, 4096  # rows and columns of a tile: fits the cache of a CPU; few launches on CUDA


def kernels_for(product: Tensor) -> Any:
    """Return the module of kernels for products of this device and type; None where the definition is used."""
    if product.dtype != torch.float32 or not product.numel():
        return None
    if product.device.type == "cuda":
        try:
            from trime.memory.objective import blockwise_cuda
        except ImportError:  # on some systems torch for CUDA comes without triton
            return None
        return blockwise_cuda
    return blockwise_cpu if product.device.type == "cpu" else None


def slices(length: int, block: int) -> list[slice]:
    """Return consecutive slices of at most ``block`` elements."""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def extents(positions: TokenPosition, block: int) -> list[Extent]:
    """Return the extent of each block of positions, with a single transfer to the host."""
    if not len(positions.segment):
        return []
    bounds = [torch.stack([torch.stack([part.min(), part.max()]) for part in column.split(block)]) for column in positions]
    return [Extent(*((low, high) for low, high in blocks)) for blocks in torch.stack(bounds, 1).tolist()]


class Tile(NamedTuple):
    """Rows of queries, columns of memory, and the mask of what rows see of columns; null: everything.

    ``both``: the columns are queries to the rows too, and ``back`` masks what they see of the rows.
    """

    row: slice
    column: slice
    seen: Bool[Tensor, "n m"] | None
    both: bool = False
    back: Bool[Tensor, "n m"] | None = None


class Tiles:
    """The tiles over queries and memory in which something is visible."""

    def __init__(self, query: Contexts, memory: Contexts, visibility: Visibility, block: int, symmetric: bool):
        self.query, self.memory, self.visibility, self.symmetric = query, memory, visibility, symmetric
        self.rows, self.row_extents = slices(len(query.token), block), extents(query.positions, block)
        self.columns, self.column_extents = slices(len(memory.token), block), extents(memory.positions, block)

    def __iter__(self) -> Iterator[Tile]:
        for row in range(len(self.rows)):
            for column in range(row + 1 if self.symmetric else len(self.columns)):
                visible = not self.visibility.rules_out(self.row_extents[row], self.column_extents[column])
                if self.symmetric and column < row and self.visible_back(row, column):
                    back = self.seen(column, row)
                    if visible:
                        yield Tile(
                            self.rows[row],
                            self.columns[column],
                            self.seen(row, column),
                            True,
                            None if back is None else back.T.contiguous(),
                        )
                    else:
                        yield Tile(self.rows[column], self.columns[row], back)
                elif visible:
                    yield Tile(self.rows[row], self.columns[column], self.seen(row, column))

    def visible_back(self, row: int, column: int) -> bool:
        """Return whether queries in the column's block see anything of the row's block."""
        return not self.visibility.rules_out(self.row_extents[column], self.column_extents[row])

    def seen(self, row: int, column: int) -> Bool[Tensor, "n m"] | None:
        """Return the mask of what a block of queries sees of a block of memory; None: everything."""
        if self.visibility.shows_all(self.row_extents[row], self.column_extents[column]):
            return None
        return self.visibility.sees(self.query.positions.take(self.rows[row]), self.memory.positions.take(self.columns[column]))


def mask_scores(scores: Float[Tensor, "t n m"], seen: Bool[Tensor, "n m"] | None) -> Tensor:
    """Return scores with -inf where an entry is not visible."""
    return scores if seen is None else scores.masked_fill(~seen, -math.inf)


def add_masses(target: Tensor, total: Tensor, scores: Float[Tensor, "t n m"], seen: Tensor | None, hit: Tensor) -> None:
    """Add a tile's columns to the masses of its rows, in place, by the definition."""
    torch.logaddexp(total, mask_scores(scores, seen).logsumexp(-1), out=total)
    if hit.any():
        torch.logaddexp(target, mask_scores(scores, hit if seen is None else hit & seen).logsumexp(-1), out=target)


TargetAndTotal = Sequence[Float[Tensor, "t all"]]  # of target and total


def score_gradients(
    masses: TargetAndTotal,
    gradients: TargetAndTotal,
    rows: slice,
    scores: Float[Tensor, "t n m"],
    seen: Tensor | None,
    hit: Tensor,
) -> Float[Tensor, "t n m"]:
    """Return the gradient of a tile's scores that comes from its rows, by the definition."""
    # Where nothing is visible the mass is -inf; 0 instead gives exp(-inf - 0) = 0 instead of NaN, and no gradient.
    target, total = (torch.where(part.isinf(), 0, part)[:, rows, None] for part in masses)
    grad_target, grad_total = (
        torch.where(part.isinf(), 0, gradient)[:, rows, None] for part, gradient in zip(masses, gradients, strict=True)
    )
    slope = (mask_scores(scores, seen) - total).exp_() * grad_total
    reached = hit if seen is None else hit & seen
    return slope.add_((mask_scores(scores, reached) - target).exp_() * grad_target)


class _Blockwise(torch.autograd.Function):
    """The masses of targets and in all, with the gradient of the module's docstring."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, memory: Tensor, divisor: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        total = query.new_full((len(divisor), len(query)), -math.inf)
        target = total.clone()
        for tile in tiles:
            product = query[tile.row] @ memory[tile.column].T
            kernels = kernels_for(product)
            if kernels and kernels.add_masses(target, total, product, divisor, tile, tiles):
                continue
            scores, hit = product / divisor[:, None, None], token_matches(tiles, tile)
            add_masses(target[:, tile.row], total[:, tile.row], scores, tile.seen, hit)
            if tile.both:
                back = None if tile.back is None else tile.back.T
                add_masses(target[:, tile.column], total[:, tile.column], scores.mT, back, hit.T)
        ctx.save_for_backward(query, memory, divisor, target, total)
        ctx.tiles = tiles
        return target, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        query, memory, divisor, *masses = ctx.saved_tensors
        grad_query = torch.zeros_like(query)
        grad_memory = grad_query if ctx.tiles.symmetric else torch.zeros_like(memory)
        for tile in ctx.tiles:
            row, column = tile.row, tile.column
            product = query[row] @ memory[column].T
            kernels = kernels_for(product)
            slope = kernels.score_gradients(masses, gradients, product, divisor, tile, ctx.tiles) if kernels else None
            if slope is None:
                scores, hit = product / divisor[:, None, None], token_matches(ctx.tiles, tile)
                gradient = score_gradients(masses, gradients, row, scores, tile.seen, hit)
                if tile.both:
                    back = None if tile.back is None else tile.back.T
                    gradient += score_gradients(masses, gradients, column, scores.mT, back, hit.T).mT
                slope = (gradient / divisor[:, None, None]).sum(0)
            grad_query[row].addmm_(slope, memory[column])
            grad_memory[column].addmm_(slope.T, query[row])
        return grad_query, None if ctx.tiles.symmetric else grad_memory, None, None


def token_matches(tiles: Tiles, tile: Tile) -> Bool[Tensor, "n m"]:
    """Return the mask of pairs in which the row's target is the column's token."""
    return tiles.query.token[tile.row, None] == tiles.memory.token[None, tile.column]


def blockwise_mass(
    query: Contexts,
    memory: Contexts,
    visibility: Visibility,
    divisor: Float[Tensor, " t"],
    block: int | None = None,
    metric: str = "ip",
) -> Mass:
    """Return the mass [t n] of the visible memory for each query; -inf where nothing (with the target) is visible.

    The mass is differentiable in the g of both; scores are computed in float32 at least. Where ``query`` and ``memory``
    are the same object, half of the work is saved, unless the metric is l2.
    """
    dtype = torch.promote_types(torch.promote_types(query.g.dtype, memory.g.dtype), torch.float32)
    with torch.autocast(query.g.device.type, enabled=False):
        g = query.g.to(dtype)
        queries, keys = as_inner_products(g, g if query is memory else memory.g.to(dtype), metric)
        block = block or (CUDA_BLOCK if g.device.type == "cuda" else BLOCK)
        tiles = Tiles(query, memory, visibility, block, query is memory and queries is keys)
        target, total = _Blockwise.apply(queries, keys, divisor.to(g), tiles)
    return Mass(target, total)
