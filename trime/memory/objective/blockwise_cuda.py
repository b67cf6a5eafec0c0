"""One tile of the blockwise mass on a CUDA device: cuBLAS makes its products, Triton the rest in one pass over them.

A tile is read once for its rows and, where its columns are queries too, once for its columns, each with a running maximum of
its own; the backward pass turns it into slopes in place. So a tile costs its products and three passes over memory.
Measured nowhere yet: tested on the CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from trime.types import Tensor

ROWS, COLUMNS = 32, 128  # of a program


def add_masses(target: Tensor, total: Tensor, product: Tensor, divisor: Tensor, tile: Any, tiles: Any) -> bool:
    """Adds a tile to the masses [t n], in place."""
    rows, columns = tokens(tile, tiles)
    sides = [(product, tile.seen, rows, columns, tile.row), (product.T, transposed(tile.back), columns, rows, tile.column)]
    for number, scale in enumerate((1 / divisor).tolist()):
        for score, seen, token, others, part in sides[: 1 + tile.both]:
            own = score.new_empty(2, len(score))
            _masses[(triton.cdiv(len(score), ROWS),)](
                score, *score.stride(), *score.shape, *sight(seen, score), scale, token, others, own, ROWS, COLUMNS
            )
            for mass, added in ((total, own[0]), (target, own[1])):
                torch.logaddexp(mass[number, part], added, out=mass[number, part])
    return True


def score_gradients(
    masses: Sequence[Tensor], gradients: Sequence[Tensor], product: Tensor, divisor: Tensor, tile: Any, tiles: Any
) -> Tensor | None:
    """The gradient [n m] of a tile's products, in their place; null for several temperatures."""
    if len(divisor) > 1:
        return None
    n, m = product.shape
    of_rows, of_columns = (
        [torch.cat([part[:, own] for part in reversed(which)]) for which in (masses, gradients)]
        for own in (tile.row, tile.column)
    )
    seen, back = sight(tile.seen, product), sight(tile.back, product)
    _slopes[(triton.cdiv(n, ROWS), triton.cdiv(m, COLUMNS))](
        product, n, m, *seen, *back, tile.both, 1 / float(divisor), *tokens(tile, tiles), *of_rows, *of_columns, ROWS, COLUMNS
    )
    return product


def tokens(tile: Any, tiles: Any) -> tuple[Tensor, Tensor]:
    """Of the tile's rows and columns."""
    return tiles.query.token[tile.row].contiguous(), tiles.memory.token[tile.column].contiguous()


def transposed(seen: Tensor | None) -> Tensor | None:
    return None if seen is None else seen.T


def sight(seen: Tensor | None, score: Tensor) -> tuple[Tensor, int, int, bool]:
    """What is seen as bytes, its strides, and whether it is everything."""
    if seen is None:
        return score, 0, 0, True
    return seen.view(torch.uint8), seen.stride(0), seen.stride(1), False


def triton_jit(function: Any) -> Any:
    """What Triton makes of a function as it is written, whatever an import hook has put around it."""
    return triton.jit(inspect.unwrap(function))


@triton_jit
def running(top, total, score):  # type: ignore[no-untyped-def]
    """The maximum and the sum of exponentials below it, of what came before and a block of scores."""
    new = tl.maximum(top, tl.max(score, 1))
    finite = tl.where(new == -math.inf, 0.0, new)
    return new, total * tl.exp(top - finite) + tl.sum(tl.exp(score - finite[:, None]), 1)


@triton_jit
def visible(seen, by_row, by_column, everything: tl.constexpr, row, column, there):  # type: ignore[no-untyped-def]
    """Which of the pairs that exist are seen."""
    if everything:
        return there
    return there & (tl.load(seen + row[:, None] * by_row + column[None, :] * by_column, there, 0) != 0)


@triton_jit
def _masses(  # type: ignore[no-untyped-def]
    score, by_row, by_column, n, m, seen, seen_by_row, seen_by_column, everything: tl.constexpr, scale,
    row_token, column_token, out, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    token = tl.load(row_token + row, row < n, 0)
    top, total = tl.full([rows], -math.inf, tl.float32), tl.zeros([rows], tl.float32)
    own_top, own = tl.full([rows], -math.inf, tl.float32), tl.zeros([rows], tl.float32)
    for start in range(0, m, columns):
        column = start + tl.arange(0, columns)
        there = (row < n)[:, None] & (column < m)[None, :]
        see = visible(seen, seen_by_row, seen_by_column, everything, row, column, there)
        s = scale * tl.load(score + row[:, None] * by_row + column[None, :] * by_column, there, 0.0)
        s = tl.where(see, s, -math.inf)
        top, total = running(top, total, s)
        hit = token[:, None] == tl.load(column_token + column, column < m, 0)[None, :]
        own_top, own = running(own_top, own, tl.where(hit, s, -math.inf))
    tl.store(out + row, top + tl.log(total), row < n)
    tl.store(out + n + row, own_top + tl.log(own), row < n)


@triton_jit
def slope(s, see, hit, total, target, grad_total, grad_target):  # type: ignore[no-untyped-def]
    """exp(s - total) d total + [hit] exp(s - target) d target, where it is seen."""
    whole = tl.where(see, tl.exp(s - total) * grad_total, 0.0)
    return whole + tl.where(see & hit, tl.exp(s - target) * grad_target, 0.0)


@triton_jit
def _slopes(  # type: ignore[no-untyped-def]
    score, n, m, seen, seen_by_row, seen_by_column, everything: tl.constexpr,
    back, back_by_row, back_by_column, all_back: tl.constexpr, both: tl.constexpr, scale,
    row_token, column_token, row_mass, row_grad, column_mass, column_grad, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    there = (row < n)[:, None] & (column < m)[None, :]
    at = score + row[:, None] * m + column[None, :]
    s = scale * tl.load(at, there, 0.0)
    hit = tl.load(row_token + row, row < n, 0)[:, None] == tl.load(column_token + column, column < m, 0)[None, :]
    total, target = tl.load(row_mass + row, row < n, 0.0), tl.load(row_mass + n + row, row < n, 0.0)
    of_total, of_target = tl.load(row_grad + row, row < n, 0.0), tl.load(row_grad + n + row, row < n, 0.0)
    see = visible(seen, seen_by_row, seen_by_column, everything, row, column, there)
    whole = slope(s, see, hit, total[:, None], target[:, None], of_total[:, None], of_target[:, None])
    if both:
        total, target = tl.load(column_mass + column, column < m, 0.0), tl.load(column_mass + m + column, column < m, 0.0)
        of_total = tl.load(column_grad + column, column < m, 0.0)
        of_target = tl.load(column_grad + m + column, column < m, 0.0)
        see = visible(back, back_by_row, back_by_column, all_back, row, column, there)
        whole += slope(s, see, hit, total[None, :], target[None, :], of_total[None, :], of_target[None, :])
    tl.store(at, scale * whole, there)
