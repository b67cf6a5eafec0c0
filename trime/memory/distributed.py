"""Contexts of all processes of a training: in-batch memory spans devices, with gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from trime.types import Contexts, Tensor, TokenPosition


def gather_contexts(seen: Contexts, gradient: bool = True) -> Contexts:
    """The contexts of every process, in order of ranks; of one process alone, ``seen`` itself.

    ``gradient`` false: none reaches other processes' representations, as in the published code.
    """
    if world_size() == 1:
        return seen
    counts = gather_counts(len(seen.token), seen.token.device)
    gather = _Gather.apply if gradient else _gather_own
    g = gather(seen.g, counts)
    numbers = torch.stack([seen.token, *seen.place], 1)
    token, *place = torch.cat(all_gather_rows(numbers, counts)).unbind(1)
    return Contexts(g, token, TokenPosition(*place))


def world_size() -> int:
    """How many train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def all_reduce_sum(*own: float, device: torch.device) -> list[float]:
    """Numbers, each summed over all processes."""
    numbers = torch.tensor(own, dtype=torch.float64, device=device)
    if world_size() > 1:
        distributed.all_reduce(numbers)
    return numbers.tolist()


def gather_counts(own: int, device: torch.device) -> list[int]:
    """How many rows each process has."""
    mine = torch.tensor([own], device=device)
    every = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(every, mine)
    return [int(count) for count in every]


def all_gather_rows(rows: Tensor, counts: list[int]) -> list[Tensor]:
    """The rows of every process; all are filled up to the longest on the way, for collectives want equal shapes."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    every = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(every, padded)
    return [part[:count] for part, count in zip(every, counts, strict=True)]


def all_gather_varlen(rows: Tensor) -> list[Tensor]:
    """Rows of all processes, whatever their type, as copies on the host."""
    if world_size() == 1:
        return [rows.detach().cpu().clone()]
    plain = rows.detach().byte() if rows.dtype == torch.bool else rows.detach()  # collectives know no bool
    return [part.to("cpu", rows.dtype) for part in all_gather_rows(plain, gather_counts(len(rows), rows.device))]


def _gather_own(g: Tensor, counts: list[int]) -> Tensor:
    parts = all_gather_rows(g.detach(), counts)
    parts[distributed.get_rank()] = g
    return torch.cat(parts)


def as_full_tensor(tensor: Tensor) -> Tensor:
    """A tensor of which every process may have a part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def rank_rows(columns: list[list[Tensor]], rank: int, world: int) -> list[Tensor]:
    """What is this process's of what processes saved, however many those were: each column's parts in order of ranks.

    A column has one entry a row of the batch, or the same number of them for each (heads, say).
    """
    joined = [torch.cat(parts) for parts in columns]
    rows = max(1, min(map(len, joined), default=1))
    first, last = (rows * number // world for number in (rank, rank + 1))
    return [column[first * (len(column) // rows) : last * (len(column) // rows)] for column in joined]


class _Gather(torch.autograd.Function):
    """Forward: the rows of all ranks. Backward: the sum over ranks of what their losses want of one's own rows."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        return torch.cat(all_gather_rows(g, counts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].contiguous().clone()
        distributed.all_reduce(whole)
        return whole.split(ctx.counts)[distributed.get_rank()], None
