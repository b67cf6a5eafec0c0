"""One tile of the blockwise mass on a CUDA device: cuBLAS computes the products, Triton the rest in one pass over them.

A tile is read once for its rows and, where its columns are queries too, once for its columns, each with its own running
maximum; the backward pass overwrites it with gradients. So a tile costs its products and three passes over memory.
Its speed is not measured yet; it is tested on the CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from trime.kernels.triton_kernels import triton_jit
from trime.memory.objective.tiles import TargetAndTotal, Tile, Tiles
from trime.types import Tensor

ROWS, COLUMNS = 32, 128  # of a tile that one program computes


def add_masses(target: Tensor, total: Tensor, product: Tensor, divisor: Tensor, tile: Tile, tiles: Tiles) -> bool:
    """Add a tile to the masses [t n], in place; return true."""
    rows, columns = tokens(tile, tiles)
    sides = [(product, tile.visible, rows, columns, tile.row), (product.T, transposed(tile.back), columns, rows, tile.column)]
    for number, scale in enumerate((1 / divisor).tolist()):
        for score, visible, token, others, part in sides[: 1 + tile.both]:
            mass = score.new_empty(2, len(score))
            _masses[(triton.cdiv(len(score), ROWS),)](
                score, *score.stride(), *score.shape, *sight(visible, score), scale, token, others, mass, ROWS, COLUMNS
            )
            for result, added in ((total, mass[0]), (target, mass[1])):
                torch.logaddexp(result[number, part], added, out=result[number, part])
    return True


def score_gradients(
    masses: TargetAndTotal, gradients: TargetAndTotal, product: Tensor, divisor: Tensor, tile: Tile, tiles: Tiles
) -> Tensor | None:
    """Return the gradient [n m] of a tile's products, written in their place; None for several temperatures."""
    if len(divisor) > 1:
        return None
    n, m = product.shape
    of_rows, of_columns = (
        [torch.cat([part[:, side] for part in reversed(pair)]) for pair in (masses, gradients)]
        for side in (tile.row, tile.column)
    )
    visible, back = sight(tile.visible, product), sight(tile.back, product)
    _slopes[(triton.cdiv(n, ROWS), triton.cdiv(m, COLUMNS))](
        product,
        n,
        m,
        *visible,
        *back,
        tile.both,
        1 / float(divisor),
        *tokens(tile, tiles),
        *of_rows,
        *of_columns,
        ROWS,
        COLUMNS,
    )
    return product


def tokens(tile: Tile, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return the targets of a tile's rows and the tokens of its columns."""
    return tiles.query.token[tile.row].contiguous(), tiles.memory.token[tile.column].contiguous()


def transposed(visible: Tensor | None) -> Tensor | None:
    """Return a transposed mask; None stays None."""
    return None if visible is None else visible.T


def sight(visible: Tensor | None, score: Tensor) -> tuple[Tensor, int, int, bool]:
    """Return a mask as bytes, its strides, and whether everything is visible."""
    if visible is None:
        return score, 0, 0, True
    return visible.view(torch.uint8), visible.stride(0), visible.stride(1), False


@triton_jit
def running(top, total, score):  # type: ignore[no-untyped-def]
    """Return the running maximum and the sum of exponentials relative to it, with a block of scores added."""
    new = tl.maximum(top, tl.max(score, 1))
    finite = tl.where(new == -math.inf, 0.0, new)
    return new, total * tl.exp(top - finite) + tl.sum(tl.exp(score - finite[:, None]), 1)


@triton_jit
def visible_pairs(visible, by_row, by_column, everything: tl.constexpr, row, column, inside):  # type: ignore[no-untyped-def]
    """Return the mask of visible pairs among those inside the tile."""
    if everything:
        return inside
    return inside & (tl.load(visible + row[:, None] * by_row + column[None, :] * by_column, inside, 0) != 0)


@triton_jit
def _masses(  # type: ignore[no-untyped-def]
    score, by_row, by_column, n, m, visible, visible_by_row, visible_by_column, everything: tl.constexpr, scale,
    row_token, column_token, out, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    token = tl.load(row_token + row, row < n, 0)
    top, total = tl.full([rows], -math.inf, tl.float32), tl.zeros([rows], tl.float32)
    target_top, target_total = tl.full([rows], -math.inf, tl.float32), tl.zeros([rows], tl.float32)
    for start in range(0, m, columns):
        column = start + tl.arange(0, columns)
        inside = (row < n)[:, None] & (column < m)[None, :]
        see = visible_pairs(visible, visible_by_row, visible_by_column, everything, row, column, inside)
        s = scale * tl.load(score + row[:, None] * by_row + column[None, :] * by_column, inside, 0.0)
        s = tl.where(see, s, -math.inf)
        top, total = running(top, total, s)
        hit = token[:, None] == tl.load(column_token + column, column < m, 0)[None, :]
        target_top, target_total = running(target_top, target_total, tl.where(hit, s, -math.inf))
    tl.store(out + row, top + tl.log(total), row < n)
    tl.store(out + n + row, target_top + tl.log(target_total), row < n)


@triton_jit
def slope(s, see, hit, total, target, grad_total, grad_target):  # type: ignore[no-untyped-def]
    """Return exp(s - total) d total + [hit] exp(s - target) d target for visible pairs, 0 for others."""
    from_total = tl.where(see, tl.exp(s - total) * grad_total, 0.0)
    return from_total + tl.where(see & hit, tl.exp(s - target) * grad_target, 0.0)


@triton_jit
def _slopes(  # type: ignore[no-untyped-def]
    score, n, m, visible, visible_by_row, visible_by_column, everything: tl.constexpr,
    back, back_by_row, back_by_column, all_back: tl.constexpr, both: tl.constexpr, scale,
    row_token, column_token, row_mass, row_grad, column_mass, column_grad, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = (row < n)[:, None] & (column < m)[None, :]
    at = score + row[:, None] * m + column[None, :]
    s = scale * tl.load(at, inside, 0.0)
    hit = tl.load(row_token + row, row < n, 0)[:, None] == tl.load(column_token + column, column < m, 0)[None, :]
    total, target = tl.load(row_mass + row, row < n, 0.0), tl.load(row_mass + n + row, row < n, 0.0)
    grad_total, grad_target = tl.load(row_grad + row, row < n, 0.0), tl.load(row_grad + n + row, row < n, 0.0)
    see = visible_pairs(visible, visible_by_row, visible_by_column, everything, row, column, inside)
    gradient = slope(s, see, hit, total[:, None], target[:, None], grad_total[:, None], grad_target[:, None])
    if both:
        total, target = tl.load(column_mass + column, column < m, 0.0), tl.load(column_mass + m + column, column < m, 0.0)
        grad_total = tl.load(column_grad + column, column < m, 0.0)
        grad_target = tl.load(column_grad + m + column, column < m, 0.0)
        see = visible_pairs(back, back_by_row, back_by_column, all_back, row, column, inside)
        gradient += slope(s, see, hit, total[None, :], target[None, :], grad_total[None, :], grad_target[None, :])
    tl.store(at, scale * gradient, inside)
