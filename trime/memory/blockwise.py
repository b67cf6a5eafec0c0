"""A memory's mass for every query, tile by tile: no [n, m] tensor beyond a block, forward or backward.

With scores s_ij = g_i . g_j / divisor over visible j (TRIME Eq. 5, 6):

    total_i  = logsumexp_j s_ij
    target_i = logsumexp_(j: x_j = x_i) s_ij
    d s_ij   = exp(s_ij - total_i) d total_i + [x_j = x_i] exp(s_ij - target_i) d target_i

Forward keeps 2 t n numbers; backward computes the scores again. Memory is O((n + m) d + t n + block^2),
time 2 t n m d forward and 3 products backward, less the tiles that a visibility rules out.
The target's running maximum is kept apart from the total's: it may lie far below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from trime.memory.visibility import Extent, Visibility
from trime.types import Bool, Contexts, Float, Mass, Place, Tensor

BLOCK = 512


def slices(length: int, block: int) -> list[slice]:
    """Consecutive slices of at most ``block``."""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def extents(place: Place, block: int) -> list[Extent]:
    """The extent of each block of places; one transfer to the host for all of them."""
    if not len(place.segment):
        return []
    bounds = [torch.stack([torch.stack([part.min(), part.max()]) for part in column.split(block)]) for column in place]
    return [Extent(*((low, high) for low, high in blocks)) for blocks in torch.stack(bounds, 1).tolist()]


class Tiles:
    """The tiles of a visibility over queries and memory, each with what is visible and what hits the target."""

    def __init__(self, query: Contexts, memory: Contexts, visibility: Visibility, block: int = BLOCK):
        self.query, self.memory, self.visibility, self.block = query, memory, visibility, block

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        reach = extents(self.memory.place, self.block)
        columns = slices(len(self.memory.token), self.block)
        rows = slices(len(self.query.token), self.block)
        for row, row_extent in zip(rows, extents(self.query.place, self.block), strict=True):
            for column, extent in zip(columns, reach, strict=True):
                if not self.visibility.rules_out(row_extent, extent):
                    yield row, column, *self.masks(row, column)

    def masks(self, row: slice, column: slice) -> tuple[Bool[Tensor, "n m"], Bool[Tensor, "n m"]]:
        """Invisible pairs, and pairs that are invisible or miss the target: both are set to -inf."""
        hidden = ~self.visibility.sees(self.query.place.take(row), self.memory.place.take(column))
        return hidden, hidden | (self.query.token[row, None] != self.memory.token[None, column])


def accumulate(running: Tensor, scores: Float[Tensor, "t n m"], hidden: Bool[Tensor, "n m"]) -> None:
    """running <- logaddexp(running, logsumexp of the scores that are not hidden), in place."""
    found = scores.masked_fill(hidden, -math.inf).logsumexp(-1)
    torch.logaddexp(running, found, out=running)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, memory: Tensor, divisor: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        total = query.new_full((len(divisor), len(query)), -math.inf)
        target = total.clone()
        for row, column, hidden, missed in tiles:
            scores = (query[row] @ memory[column].T) / divisor[:, None, None]
            accumulate(total[:, row], scores, hidden)
            if not missed.all():
                accumulate(target[:, row], scores, missed)
        ctx.save_for_backward(query, memory, divisor, target, total)
        ctx.tiles = tiles
        return target, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query, memory, divisor, target, total = ctx.saved_tensors
        grad_target, grad_total = (part[:, :, None] for part in gradients)
        # Where nothing is visible the mass is -inf: any finite stand-in gives exp(-inf - 0) = 0, never NaN.
        target, total = (torch.where(part.isinf(), 0, part)[:, :, None] for part in (target, total))
        grad_query, grad_memory = torch.zeros_like(query), torch.zeros_like(memory)
        for row, column, hidden, missed in ctx.tiles:
            scores = (query[row] @ memory[column].T) / divisor[:, None, None]
            slope = (scores - total[:, row]).masked_fill_(hidden, -math.inf).exp_().mul_(grad_total[:, row])
            hit = (scores - target[:, row]).masked_fill_(missed, -math.inf).exp_().mul_(grad_target[:, row])
            slope = (slope.add_(hit) / divisor[:, None, None]).sum(0)
            grad_query[row] += slope @ memory[column]
            grad_memory[column] += slope.T @ query[row]
        return grad_query, grad_memory, None, None


def blockwise_mass(
    query: Contexts,
    memory: Contexts,
    visibility: Visibility,
    divisor: Float[Tensor, " t"],
    block: int = BLOCK,
) -> Mass:
    """Mass [t n] of the visible memory for each query; -inf where nothing (with the target) is visible.

    Differentiable in both g. Scores are computed in float32 at least.
    """
    dtype = torch.promote_types(torch.promote_types(query.g.dtype, memory.g.dtype), torch.float32)
    tiles = Tiles(query._replace(g=query.g.detach()), memory._replace(g=memory.g.detach()), visibility, block)
    with torch.autocast(query.g.device.type, enabled=False):
        target, total = _Blockwise.apply(query.g.to(dtype), memory.g.to(dtype), divisor.to(query.g.device, dtype), tiles)
    return Mass(target, total)
