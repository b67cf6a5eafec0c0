"""Collectives over the processes of a training, so that in-batch memory spans all devices, with gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from trime.common.types import Contexts, Tensor, TokenPosition


def gather_contexts(contexts: Contexts, gradient: bool = True) -> Contexts:
    """Return the contexts of all processes, by rank; without ``gradient`` none reaches those of others, as published."""
    if world_size() == 1:
        return contexts
    counts = gather_counts(len(contexts.token), contexts.token.device)
    gather = _Gather.apply if gradient else _gather_own
    g = gather(contexts.g, counts)
    labels = torch.stack([contexts.token, *contexts.positions], 1)
    token, *positions = torch.cat(all_gather_rows(labels, counts)).unbind(1)
    return Contexts(g, token, TokenPosition(*positions))


def world_size() -> int:
    """Return the number of processes of the training; 1 without torch.distributed."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def all_reduce_sum(*values: float, device: torch.device) -> list[float]:
    """Return each value summed over all processes."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    if world_size() > 1:
        distributed.all_reduce(sums)
    return sums.tolist()


def gather_counts(count: int, device: torch.device) -> list[int]:
    """Return the number of rows of every process, in order of ranks."""
    local = torch.tensor([count], device=device)
    counts = [torch.empty_like(local) for _ in range(distributed.get_world_size())]
    distributed.all_gather(counts, local)
    return [int(count) for count in counts]


def first_row(count: int, device: torch.device) -> int:
    """Return the number of rows of the processes before this one, which itself has ``count``; 0 for a single process."""
    return sum(gather_counts(count, device)[: distributed.get_rank()]) if world_size() > 1 else 0


def all_gather_rows(rows: Tensor, counts: list[int]) -> list[Tensor]:
    """Return the rows of every process; they are padded on the way, because collectives need equal shapes."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    by_rank = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(by_rank, padded)
    return [own[:count] for own, count in zip(by_rank, counts, strict=True)]


def all_gather_varlen(rows: Tensor) -> list[Tensor]:
    """Return the rows of every process, of any type, as copies on the CPU."""
    if world_size() == 1:
        return [rows.detach().cpu().clone()]
    plain = rows.detach().byte() if rows.dtype == torch.bool else rows.detach()  # collectives do not support bool
    return [of_rank.to("cpu", rows.dtype) for of_rank in all_gather_rows(plain, gather_counts(len(rows), rows.device))]


def _gather_own(g: Tensor, counts: list[int]) -> Tensor:
    """Return the rows of all ranks; gradient reaches only those of this rank."""
    by_rank = all_gather_rows(g.detach(), counts)
    by_rank[distributed.get_rank()] = g
    return torch.cat(by_rank)


def as_full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor as a whole, gathered where it is sharded over the processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def rank_rows(columns: list[list[Tensor]], rank: int, world: int) -> list[Tensor]:
    """Return a rank's part of each column, which any number of processes saved in parts by rank."""
    # A column has as many entries for each row as another: one, or one for each head, say.
    joined = [torch.cat(by_rank) for by_rank in columns]
    rows = max(1, min(map(len, joined), default=1))
    first, last = (rows * number // world for number in (rank, rank + 1))
    return [column[first * (len(column) // rows) : last * (len(column) // rows)] for column in joined]


class _Gather(torch.autograd.Function):
    """Gather the rows of all ranks; the gradient of a rank's rows is summed over the losses of all ranks."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        return torch.cat(all_gather_rows(g, counts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every rank's loss depends on these rows: their gradient is the sum over ranks.
        gradient = gradients[0].contiguous().clone()
        distributed.all_reduce(gradient)
        return gradient.split(ctx.counts)[distributed.get_rank()], None
