"""The mass of a memory for every query, tile by tile: no [n, m] tensor beyond a block, forward or backward.

With scores s_ij = g_i . g_j / divisor over visible j (TRIME Eq. 5, 6):

    total_i  = logsumexp_j s_ij
    target_i = logsumexp_(j: x_j = x_i) s_ij
    d s_ij   = exp(s_ij - total_i) d total_i + [x_j = x_i] exp(s_ij - target_i) d target_i

The forward pass stores 2 t n numbers; the backward pass computes the scores again. Memory is O((n + m) d + t n + t block^2).
Tiles that a visibility rules out are skipped. Where the queries are the memory, as in training, s is symmetric: one tile
serves its rows and its columns, so that forward and backward take 2 n^2 d multiplications instead of 4 n^2 d (the whole
matrix at once takes 3 n^2 d). A tile on the diagonal serves both in the backward pass only: three products instead of four.
The kernels of ``blockwise_cpu`` and ``blockwise_cuda`` are tested against the definition below, which also computes the tiles
that they decline.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trime.common.types import Bool, Contexts, Float, LogMass, Tensor
from trime.token_memory.similarity import as_inner_products
from trime.token_memory.train.objective import blockwise_cpu
from trime.token_memory.train.objective.tiles import TargetAndTotal, Tile, Tiles
from trime.token_memory.train.visibility import Visibility

# Rows and columns of a tile: on a CPU they fit its cache, and little is computed that is masked; on CUDA launches are few.
BLOCK, CUDA_BLOCK = 512, 6144


def kernels_for(product: Tensor) -> ModuleType | None:
    """Return the kernels for products of this device and type, which may decline a tile; None: the definition is used."""
    if product.dtype != torch.float32 or not product.numel():
        return None
    if product.device.type == "cuda":
        try:
            from trime.token_memory.train.objective import blockwise_cuda
        except ImportError:  # on some systems torch for CUDA comes without triton
            return None
        return blockwise_cuda
    return blockwise_cpu if product.device.type == "cpu" else None


def mask_scores(scores: Float[Tensor, "t n m"], visible: Bool[Tensor, "n m"] | None) -> Tensor:
    return scores if visible is None else scores.masked_fill(~visible, -math.inf)


def reference_add_masses(
    target: Tensor, total: Tensor, scores: Float[Tensor, "t n m"], visible: Tensor | None, hit: Tensor
) -> None:
    """Add a tile's columns to the masses of its rows, in place, by the definition."""
    torch.logaddexp(total, mask_scores(scores, visible).logsumexp(-1), out=total)
    if hit.any():
        torch.logaddexp(target, mask_scores(scores, hit if visible is None else hit & visible).logsumexp(-1), out=target)


def reference_score_gradients(
    masses: TargetAndTotal,
    gradients: TargetAndTotal,
    rows: slice,
    scores: Float[Tensor, "t n m"],
    visible: Tensor | None,
    hit: Tensor,
) -> Float[Tensor, "t n m"]:
    """Return the gradient of a tile's scores that comes from its rows, by the definition."""
    # Where nothing is visible the mass is -inf; 0 instead gives exp(-inf - 0) = 0 instead of NaN, and no gradient.
    target, total = (torch.where(mass.isinf(), 0, mass)[:, rows, None] for mass in masses)
    grad_target, grad_total = (
        torch.where(mass.isinf(), 0, gradient)[:, rows, None] for mass, gradient in zip(masses, gradients, strict=True)
    )
    slope = (mask_scores(scores, visible) - total).exp_() * grad_total
    reached = hit if visible is None else hit & visible
    return slope.add_((mask_scores(scores, reached) - target).exp_() * grad_target)


class _Blockwise(torch.autograd.Function):
    """The masses of targets and in all, with the gradient of the module's docstring."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, memory: Tensor, divisor: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        total = query.new_full((len(divisor), len(query)), -math.inf)
        target = total.clone()
        for tile in tiles:
            add_tile(target, total, query[tile.row] @ memory[tile.column].T, divisor, tile, tiles)
        ctx.save_for_backward(query, memory, divisor, target, total)
        ctx.tiles = tiles
        return target, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        query, memory, divisor, *masses = ctx.saved_tensors
        grad_query = torch.zeros_like(query)
        grad_memory = grad_query if ctx.tiles.symmetric else torch.zeros_like(memory)
        for tile in ctx.tiles:
            row, column = tile.row, tile.column
            on_diagonal = ctx.tiles.symmetric and row == column
            if on_diagonal:  # scores of (i, j) and (j, i) together have a symmetric gradient: one product serves g_i and g_j
                tile = tile._replace(both=True, back=None if tile.visible is None else tile.visible.T)
            slope = product_gradient(masses, gradients, query[row] @ memory[column].T, divisor, tile, ctx.tiles)
            grad_query[row].addmm_(slope, memory[column])
            if not on_diagonal:
                grad_memory[column].addmm_(slope.T, query[row])
            del slope  # before the next tile's product takes as much memory
        return grad_query, None if ctx.tiles.symmetric else grad_memory, None, None


def add_tile(target: Tensor, total: Tensor, product: Tensor, divisor: Tensor, tile: Tile, tiles: Tiles) -> None:
    """Add a tile to the masses, in place; in a function, so that its scores are freed before the next tile's product."""
    kernels = kernels_for(product)
    if kernels and kernels.add_masses(target, total, product, divisor, tile, tiles):
        return
    scores, hit = product / divisor[:, None, None], tiles.query.token[tile.row, None] == tiles.memory.token[None, tile.column]
    reference_add_masses(target[:, tile.row], total[:, tile.row], scores, tile.visible, hit)
    if tile.both:
        back = None if tile.back is None else tile.back.T
        reference_add_masses(target[:, tile.column], total[:, tile.column], scores.mT, back, hit.T)


def product_gradient(
    masses: TargetAndTotal, gradients: TargetAndTotal, product: Tensor, divisor: Tensor, tile: Tile, tiles: Tiles
) -> Float[Tensor, "n m"]:
    """Return the gradient of a tile's products, which may be overwritten."""
    kernels = kernels_for(product)
    slope = kernels.score_gradients(masses, gradients, product, divisor, tile, tiles) if kernels else None
    if slope is not None:
        return slope
    scores, hit = product / divisor[:, None, None], tiles.query.token[tile.row, None] == tiles.memory.token[None, tile.column]
    gradient = reference_score_gradients(masses, gradients, tile.row, scores, tile.visible, hit)
    if tile.both:
        back = None if tile.back is None else tile.back.T
        gradient += reference_score_gradients(masses, gradients, tile.column, scores.mT, back, hit.T).mT
    return (gradient / divisor[:, None, None]).sum(0)


def blockwise_mass(
    query: Contexts,
    memory: Contexts,
    visibility: Visibility,
    divisor: Float[Tensor, " t"],
    block: int | None = None,
    metric: str = "ip",
) -> LogMass:
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
    return LogMass(target, total)
