"""One tile of the blockwise mass on the CPU: each exponential is computed once, for the tile's rows and its columns.

With the tile's scores s_ij and their maximum c:  e_ij = exp(s_ij - c)

    sums:   of the rows  sum_j e_ij,  sum_(j: x_j = x_i) e_ij;  of the columns  sum_i e_ij,  sum_(i: x_j = x_i) e_ij
    slope:  e_ij (a_i + [x_j = x_i] b_i + a'_j + [x_j = x_i] b'_j),   a_i = exp(c - total_i) d total_i  (b: of the target)

A sum below MIN_SUM, which float32 would round away, and a factor beyond e^MAX_EXPONENT are reported: the caller then computes
the tile by the definition, in which each row has its own maximum.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import prange

from trime.common.numba_kernels import LANES, ONE, STEP, ZERO, add_lanes, exponentials, lane_sum, largest, numba_jit, run_kernel
from trime.common.types import Float, Int, LogMass, Tensor
from trime.token_memory.train.objective.tiles import TargetAndTotal, Tile, Tiles

CHUNK = 64  # rows of a thread's job
MIN_SUM = np.float32(1e-25)
MAX_EXPONENT = 57.0  # e^57 is 1 / MIN_SUM


def add_masses(target: Tensor, total: Tensor, product: Tensor, divisor: Tensor, tile: Tile, tiles: Tiles) -> bool:
    """Add a tile to the masses [t n], in place; return false, with nothing added, where the definition is needed."""
    if not tile.both:
        add_rows(target[:, tile.row], total[:, tile.row], product, divisor, tile, tiles)
        return True
    rows, columns = product.new_empty(len(divisor), 2, len(product)), product.new_empty(len(divisor), 2, product.shape[1])
    (visible, back, _, *tokens), tops = kernel_inputs(product, tile, tiles), []
    for number, scale in enumerate((1 / divisor).tolist()):
        tops.append(float(product.amax()) * scale)
        arguments = product, np.float32(scale), np.float32(tops[-1]), visible, back, *tokens, rows[number], columns[number]
        if not math.isfinite(tops[-1]) or not run_kernel(tile_sums, *arguments):
            return False
    top = product.new_tensor(tops)[:, None]
    for sums, part in ((rows, tile.row), (columns, tile.column)):
        sums.log_()
        for mass, added in ((total[:, part], sums[:, 0]), (target[:, part], sums[:, 1])):
            torch.logaddexp(mass, added.add_(top), out=mass)
    return True


def add_rows(target: Tensor, total: Tensor, product: Tensor, divisor: Tensor, tile: Tile, tiles: Tiles) -> None:
    """Add a tile to the masses [t n] of only its rows, at all temperatures; each row has its own maximum."""
    scores = product if tile.visible is None else product.masked_fill(~tile.visible, -math.inf)
    tokens = tiles.memory.token[tile.column], tiles.query.token[tile.row]
    mass = entry_masses(scores, *tokens, divisor)
    torch.logaddexp(target, mass.target, out=target)
    torch.logaddexp(total, mass.total, out=total)


def score_gradients(
    masses: TargetAndTotal, gradients: TargetAndTotal, product: Tensor, divisor: Tensor, tile: Tile, tiles: Tiles
) -> Tensor | None:
    """Return the gradient [n m] of a tile's products; None where the definition is needed."""
    if len(divisor) > 1:
        return None
    scale = 1 / float(divisor)
    top = float(product.amax()) * scale
    if not math.isfinite(top):
        return None
    slope = torch.empty_like(product)
    of_rows, of_columns = (
        [torch.cat([part[:, side] for part in reversed(pair)]) for pair in (masses, gradients)]
        for side in (tile.row, tile.column if tile.both else slice(0, 0))
    )
    arguments = product, np.float32(scale), np.float32(top), *kernel_inputs(product, tile, tiles), *of_rows, *of_columns, slope
    return slope if run_kernel(tile_slopes, *arguments) else None


def kernel_inputs(product: Tensor, tile: Tile, tiles: Tiles) -> tuple[Any, ...]:
    """Return a tile's masks and tokens as arguments of the kernels; an empty mask means everything."""
    everything = torch.empty(0, product.shape[1], dtype=torch.bool)
    visible, back = (everything if mask is None else mask.contiguous() for mask in (tile.visible, tile.back))
    rows, columns = tiles.query.token[tile.row].int(), tiles.memory.token[tile.column].int()
    return visible, back, tile.both, rows, columns


@numba_jit()
def row_sums(e, visible, token, tokens, lanes):  # type: ignore[no-untyped-def]
    """Return the sum of the visible exponentials (all if ``visible`` is empty), and that of equal tokens."""
    for j in range(len(visible)):
        e[j] *= np.float32(visible[j])
    return lane_sum(e, lanes), sum_of_equals(e, token, tokens, lanes)


@numba_jit()
def sum_of_equals(e, token, tokens, lanes):  # type: ignore[no-untyped-def]
    """Return the sum of the exponentials whose token is ``token``, in the order of ``lane_sum``."""
    lanes[:] = ZERO
    whole = len(e) // STEP * STEP
    for first in range(0, whole, STEP):
        x, y = e[first : first + STEP], tokens[first : first + STEP]
        for i in range(LANES):
            left = if_equal(x[i], y[i], token) + if_equal(x[i + LANES], y[i + LANES], token)
            right = if_equal(x[i + 2 * LANES], y[i + 2 * LANES], token) + if_equal(x[i + 3 * LANES], y[i + 3 * LANES], token)
            lanes[i] += left + right
    for first in range(whole, len(e), LANES):
        for i in range(min(LANES, len(e) - first)):
            lanes[i] += if_equal(e[first + i], tokens[first + i], token)
    return add_lanes(lanes)


@numba_jit()
def if_equal(x, token, other):  # type: ignore[no-untyped-def]
    """Return x if two tokens are equal, else 0."""
    return x if token == other else ZERO


@numba_jit()
def add_to_columns(e, visible, token, tokens, total, target):  # type: ignore[no-untyped-def]
    """Add a row to the sums of the columns."""
    if len(visible):
        for j in range(len(e)):
            value = e[j] * np.float32(visible[j])
            total[j] += value
            target[j] += value if tokens[j] == token else ZERO
    else:
        for j in range(len(e)):
            total[j] += e[j]
            target[j] += e[j] if tokens[j] == token else ZERO


@numba_jit()
def too_small(total, target, visible, token, tokens):  # type: ignore[no-untyped-def]
    """Return whether a sum is too small to be accurate, though it has terms."""
    if total >= MIN_SUM and target >= MIN_SUM:
        return False
    terms, hits = 0, 0
    if len(visible):
        for j in range(len(tokens)):
            terms += visible[j]
            hits += visible[j] and tokens[j] == token
    else:
        terms = len(tokens)
        for j in range(len(tokens)):
            hits += tokens[j] == token
    return (total < MIN_SUM and terms > 0) or (target < MIN_SUM and hits > 0)


@numba_jit(parallel=True)
def tile_sums(scores, scale, top, visible, back, row_token, column_token, rows, columns):  # type: ignore[no-untyped-def]
    """Write the sums (total, target) to ``rows`` [2 n] and ``columns`` [2 m]; return false if one is too small.

    ``visible`` [n m]: rows see columns; ``back`` [n m]: columns see rows; if empty, everything is visible.
    """
    chunks = (len(scores) + CHUNK - 1) // CHUNK
    partial, accurate = np.empty((chunks, 2, scores.shape[1]), np.float32), np.empty(chunks, np.bool_)
    for chunk in prange(chunks):
        accurate[chunk] = chunk_sums(
            np.int64(chunk), scores, scale, top, visible, back, row_token, column_token, rows, partial[chunk]
        )
    return sum_of_chunks(partial, accurate, back, row_token, column_token, columns)


@numba_jit()
def chunk_sums(chunk, scores, scale, top, visible, back, row_token, column_token, rows, partial):  # type: ignore[no-untyped-def]
    """Write a chunk's sums of rows, and its part of those of columns; return false if a row's is too small."""
    n, m = scores.shape
    e, bits, lanes = np.empty(m, np.float32), np.empty(m, np.int32), np.empty(LANES, np.float32)
    power, nothing, accurate = bits.view(np.float32), visible.ravel()[:0], True
    partial[:] = ZERO
    for i in range(chunk * CHUNK, min(n, (chunk + 1) * CHUNK)):
        exponentials(scores[i], scale, top, e, bits, power)
        mask = back[i] if len(back) else nothing
        add_to_columns(e, mask, row_token[i], column_token, partial[0], partial[1])
        mask = visible[i] if len(visible) else nothing
        rows[0, i], rows[1, i] = row_sums(e, mask, row_token[i], column_token, lanes)
        accurate &= not too_small(rows[0, i], rows[1, i], mask, row_token[i], column_token)
    return accurate


@numba_jit()
def sum_of_chunks(partial, accurate, back, row_token, column_token, columns):  # type: ignore[no-untyped-def]
    """Write the sums of columns; return false if one is too small, or a chunk has said so."""
    fine = True
    for chunk in range(len(partial)):
        fine &= accurate[chunk]
    columns[:] = ZERO
    for chunk in range(len(partial)):
        for part in range(2):
            for j in range(columns.shape[1]):
                columns[part, j] += partial[chunk, part, j]
    for j in range(columns.shape[1]):
        fine &= not too_small(columns[0, j], columns[1, j], back[:, j], column_token[j], row_token)
    return fine


@numba_jit()
def factors(top, scale, total, grad):  # type: ignore[no-untyped-def]
    """Return scale exp(top - total) d total of each row, [2 n], and whether all are within the range of float32."""
    out, fits = np.zeros(total.shape, np.float32), True
    for part in range(2):
        for i in range(total.shape[1]):
            if grad[part, i] != 0 and total[part, i] > -np.inf:
                fits &= top - total[part, i] < MAX_EXPONENT
                out[part, i] = np.exp(top - total[part, i]) * grad[part, i] * scale
    return out, fits


@numba_jit(parallel=True)
def tile_slopes(scores, scale, top, visible, back, both, row_token, column_token, row, row_grad, column, column_grad, slope):  # type: ignore[no-untyped-def]
    """Write the gradient of the unscaled scores to ``slope`` [n m]; return false if a factor is too large.

    ``row`` [2 n] and ``column`` [2 m] are log-masses (total, target), ``row_grad`` and ``column_grad`` their gradients.
    """
    a, fits = factors(top, scale, row, row_grad)
    c, also = factors(top, scale, column, column_grad)
    if fits and also:
        for chunk in prange((len(scores) + CHUNK - 1) // CHUNK):
            chunk_slopes(np.int64(chunk), scores, scale, top, visible, back, both, row_token, column_token, a, c, slope)
    return fits and also


@numba_jit()
def chunk_slopes(chunk, scores, scale, top, visible, back, both, row_token, column_token, a, c, slope):  # type: ignore[no-untyped-def]
    """Write the slopes of a chunk of rows; ``a`` and ``c`` are the factors of rows and columns."""
    n, m = scores.shape
    e, bits = np.empty(m, np.float32), np.empty(m, np.int32)
    power = bits.view(np.float32)
    for i in range(chunk * CHUNK, min(n, (chunk + 1) * CHUNK)):
        exponentials(scores[i], scale, top, e, bits, power)
        total, target, token, out = a[0, i], a[1, i], row_token[i], slope[i]
        if len(visible) == 0 and not both:
            for j in range(m):
                out[j] = e[j] * (total + (target if column_token[j] == token else ZERO))
        elif len(visible) == 0 and len(back) == 0:
            for j in range(m):
                out[j] = e[j] * (total + c[0, j] + (target + c[1, j] if column_token[j] == token else ZERO))
        else:
            for j in range(m):
                hit = np.float32(column_token[j] == token)
                share = np.float32(visible[i, j]) if len(visible) else ONE
                out[j] = e[j] * share * (total + hit * target)
            if both:
                for j in range(m):
                    hit = np.float32(column_token[j] == token)
                    share = np.float32(back[i, j]) if len(back) else ONE
                    out[j] += e[j] * share * (c[0, j] + hit * c[1, j])


def entry_masses(
    score: Float[Tensor, "n k"],
    token: Int[Tensor, "n k"] | Int[Tensor, " k"],
    target: Int[Tensor, " n"],
    divisor: Float[Tensor, " t"],
) -> LogMass:
    """Return the mass [t n] of entries, separate ones for each target or shared by all; a score of -inf is no entry."""
    masses = score.new_empty(2, len(divisor), len(target))
    kernel = add_up if token.ndim == 2 else add_up_shared
    run_kernel(kernel, score.contiguous(), token.contiguous(), target, divisor.float(), *masses)
    return LogMass(*masses)


@numba_jit(parallel=True)
def add_up(score, token, target, divisor, of_target, total):  # type: ignore[no-untyped-def]
    """Write the log-masses of all queries, each with its own tokens."""
    for row in prange(len(score)):
        add_row(score[row], token[row], target[row], divisor, of_target[:, row], total[:, row])


@numba_jit(parallel=True)
def add_up_shared(score, token, target, divisor, of_target, total):  # type: ignore[no-untyped-def]
    """Write the log-masses of all queries, which share their tokens."""
    for row in prange(len(score)):
        add_row(score[row], token, target[row], divisor, of_target[:, row], total[:, row])


@numba_jit()
def add_row(score, token, target, divisor, of_target, total):  # type: ignore[no-untyped-def]
    """Write the log-masses [t] of one query's entries: of those with its target, and of all."""
    target_scores, hits = np.empty(len(score), np.float32), 0
    for j in range(len(score)):
        if token[j] == target:
            target_scores[hits] = score[j]
            hits += 1
    out, bits = np.empty(len(score), np.float32), np.empty(len(score), np.int32)
    log_sum_exps(score, divisor, out, bits, total)
    log_sum_exps(target_scores[:hits], divisor, out[:hits], bits[:hits], of_target)


@numba_jit()
def log_sum_exps(scores, divisor, out, bits, result):  # type: ignore[no-untyped-def]
    """Write log Σ e^(x / d) for each divisor d, -inf without scores; where d is half of the next one, e is squared."""
    before, lanes = np.float32(0), np.empty(LANES, np.float32)
    top = largest(scores, lanes)
    for t in range(len(divisor) - 1, -1, -1):
        scale = np.float32(1) / divisor[t]
        if top == -np.inf:
            result[t] = top
            continue
        if abs(scale - 2 * before) <= np.float32(1e-6) * scale:
            for j in range(len(out)):
                out[j] *= out[j]
        else:
            exponentials(scores, scale, scale * top, out, bits, bits.view(np.float32))
        result[t] = scale * top + np.log(lane_sum(out, lanes))
        before = scale
