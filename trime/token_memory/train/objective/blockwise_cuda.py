"""One tile of the blockwise mass on a CUDA device: cuBLAS computes the products, Triton the rest in one pass over them.

The forward pass reads a tile once, for its rows and, where its columns are queries too, for its columns: each program leaves
the logsumexp of its block's rows and columns, and a second kernel merges these into the masses. The backward pass overwrites
the tile with gradients. So a tile costs its products and two passes over memory, and no kernel is waited for.
It is also tested on the CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from trime.common.triton_kernels import triton_jit
from trime.common.types import Tensor
from trime.token_memory.train.objective.tiles import TargetAndTotal, Tile, Tiles

ROWS, COLUMNS = 32, 128  # of a tile that one program computes
MERGED = 128  # masses that one program merges


def add_masses(target: Tensor, total: Tensor, product: Tensor, divisor: Tensor, tile: Tile, tiles: Tiles) -> bool:
    """Add a tile to the masses [t n], in place; return true."""
    n, m = product.shape
    grid = triton.cdiv(n, ROWS), triton.cdiv(m, COLUMNS)
    of_rows = product.new_empty(2, grid[1], n)
    of_columns = product.new_empty(2, grid[0], m) if tile.both else of_rows
    for number in range(len(divisor)):
        _masses[grid](
            *(product, n, m, *sight(tile.visible, product), *sight(tile.back, product), tile.both),
            *(divisor[number:], *tokens(tile, tiles), of_rows, of_columns, ROWS, COLUMNS),
        )
        for of_blocks, side in [(of_rows, tile.row), (of_columns, tile.column)][: 1 + tile.both]:
            blocks, size = of_blocks.shape[1:]
            _merge[(triton.cdiv(size, MERGED),)](total[number, side], target[number, side], of_blocks, blocks, size, MERGED)
    return True


def score_gradients(
    masses: TargetAndTotal, gradients: TargetAndTotal, product: Tensor, divisor: Tensor, tile: Tile, tiles: Tiles
) -> Tensor | None:
    """Return the gradient [n m] of a tile's products, written in their place; None for several temperatures."""
    if len(divisor) > 1:
        return None
    n, m = product.shape
    grid = triton.cdiv(n, ROWS), triton.cdiv(m, COLUMNS)
    of_rows, of_columns = (
        [values[0, side].contiguous() for pair in (masses, gradients) for values in pair] for side in (tile.row, tile.column)
    )
    _slopes[grid](
        *(product, n, m, *sight(tile.visible, product), *sight(tile.back, product), tile.both),
        *(divisor, *tokens(tile, tiles), *of_rows, *of_columns, ROWS, COLUMNS),
    )
    return product


def tokens(tile: Tile, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return the targets of a tile's rows and the tokens of its columns."""
    return tiles.query.token[tile.row].contiguous(), tiles.memory.token[tile.column].contiguous()


def sight(visible: Tensor | None, score: Tensor) -> tuple[Tensor, int, int, bool]:
    """Return a mask as bytes, its strides, and whether everything is visible."""
    if visible is None:
        return score, 0, 0, True
    return visible.view(torch.uint8), visible.stride(0), visible.stride(1), False


@triton_jit
def visible_pairs(visible, by_row, by_column, everything: tl.constexpr, row, column, inside):  # type: ignore[no-untyped-def]
    """Return the mask of visible pairs among those inside the tile."""
    if everything:
        return inside
    return inside & (tl.load(visible + row[:, None] * by_row + column[None, :] * by_column, inside, 0) != 0)


@triton_jit
def log_sum_exp(score, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the logsumexp of a block of scores along an axis; -inf where all are."""
    top = tl.max(score, axis)
    finite = tl.where(top == -math.inf, 0.0, top)
    return finite + tl.log(tl.sum(tl.exp(score - tl.expand_dims(finite, axis)), axis))


@triton_jit
def _masses(  # type: ignore[no-untyped-def]
    product, n, m, visible, visible_by_row, visible_by_column, everything: tl.constexpr,
    back, back_by_row, back_by_column, all_back: tl.constexpr, both: tl.constexpr, divisor,
    row_token, column_token, of_rows, of_columns, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    block_row, block_column = tl.program_id(0), tl.program_id(1)
    row, column = block_row * rows + tl.arange(0, rows), block_column * columns + tl.arange(0, columns)
    inside = (row < n)[:, None] & (column < m)[None, :]
    s = tl.load(product + row[:, None] * m + column[None, :], inside, 0.0) / tl.load(divisor)
    hit = tl.load(row_token + row, row < n, 0)[:, None] == tl.load(column_token + column, column < m, 0)[None, :]
    seen = tl.where(visible_pairs(visible, visible_by_row, visible_by_column, everything, row, column, inside), s, -math.inf)
    tl.store(of_rows + block_column * n + row, log_sum_exp(seen, 1), row < n)
    of_target = of_rows + tl.num_programs(1) * n
    tl.store(of_target + block_column * n + row, log_sum_exp(tl.where(hit, seen, -math.inf), 1), row < n)
    if both:
        seen = tl.where(visible_pairs(back, back_by_row, back_by_column, all_back, row, column, inside), s, -math.inf)
        tl.store(of_columns + block_row * m + column, log_sum_exp(seen, 0), column < m)
        of_target = of_columns + tl.num_programs(0) * m
        tl.store(of_target + block_row * m + column, log_sum_exp(tl.where(hit, seen, -math.inf), 0), column < m)


@triton_jit
def merged(result, of_blocks, blocks, n, row):  # type: ignore[no-untyped-def]
    """Return masses with those of all blocks added."""
    top = tl.load(result + row, row < n, -math.inf)
    total = tl.where(top == -math.inf, 0.0, 1.0)
    for block in range(blocks):
        of_block = tl.load(of_blocks + block * n + row, row < n, -math.inf)
        new = tl.maximum(top, of_block)
        finite = tl.where(new == -math.inf, 0.0, new)
        total = total * tl.exp(top - finite) + tl.exp(of_block - finite)
        top = new
    return top + tl.log(total)


@triton_jit
def _merge(total, target, of_blocks, blocks, n, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    tl.store(total + row, merged(total, of_blocks, blocks, n, row), row < n)
    tl.store(target + row, merged(target, of_blocks + blocks * n, blocks, n, row), row < n)


@triton_jit
def slope(s, see, hit, total, target, grad_total, grad_target):  # type: ignore[no-untyped-def]
    """Return exp(s - total) d total + [hit] exp(s - target) d target for visible pairs, 0 for others."""
    from_total = tl.where(see, tl.exp(s - total) * grad_total, 0.0)
    return from_total + tl.where(see & hit, tl.exp(s - target) * grad_target, 0.0)


@triton_jit
def _slopes(  # type: ignore[no-untyped-def]
    product, n, m, visible, visible_by_row, visible_by_column, everything: tl.constexpr,
    back, back_by_row, back_by_column, all_back: tl.constexpr, both: tl.constexpr, divisor, row_token, column_token,
    row_target, row_total, grad_row_target, grad_row_total,
    column_target, column_total, grad_column_target, grad_column_total, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = (row < n)[:, None] & (column < m)[None, :]
    at, scale = product + row[:, None] * m + column[None, :], 1 / tl.load(divisor)
    s = scale * tl.load(at, inside, 0.0)
    hit = tl.load(row_token + row, row < n, 0)[:, None] == tl.load(column_token + column, column < m, 0)[None, :]
    total, target = tl.load(row_total + row, row < n, 0.0), tl.load(row_target + row, row < n, 0.0)
    grad_total, grad_target = tl.load(grad_row_total + row, row < n, 0.0), tl.load(grad_row_target + row, row < n, 0.0)
    see = visible_pairs(visible, visible_by_row, visible_by_column, everything, row, column, inside)
    gradient = slope(s, see, hit, total[:, None], target[:, None], grad_total[:, None], grad_target[:, None])
    if both:
        total, target = tl.load(column_total + column, column < m, 0.0), tl.load(column_target + column, column < m, 0.0)
        grad_total = tl.load(grad_column_total + column, column < m, 0.0)
        grad_target = tl.load(grad_column_target + column, column < m, 0.0)
        see = visible_pairs(back, back_by_row, back_by_column, all_back, row, column, inside)
        gradient += slope(s, see, hit, total[None, :], target[None, :], grad_total[None, :], grad_target[None, :])
    tl.store(at, scale * gradient, inside)
