"""Output heads, which turn the output representation f into the mass of every token: adaptive or plain softmax.

A head returns a LogMass: ``total`` is the log of the mass that all tokens share in Eq. 5, ``target`` the target's part of it.
Logits are computed block by block, and again in the backward pass, so that no [n, v] tensor is kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trime.common.types import Float, Int, LogMass, Tensor
from trime.layers import pick_cpu
from trime.layers.embeddings import AdaptiveInput, PlainInput

LOGITS_PER_BLOCK = 2**23  # logits in memory at a time on the CPU: 32 MiB in float32
CUDA_LOGITS_PER_BLOCK = 2**26  # there, each block costs about a millisecond of launches


def in_blocks(
    function: Callable[..., tuple[Tensor, Tensor]], width: int, rows: Tensor, index: Tensor, *weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``function(rows, index, *weights)`` block by block; ``width`` is the number of logits per row."""
    # No [n, v] tensor is kept: checkpoints compute the logits again for the gradient.
    size = max(1, (CUDA_LOGITS_PER_BLOCK if rows.is_cuda else LOGITS_PER_BLOCK) // max(width, 1))
    if len(rows) <= size:
        return function(rows, index, *weights)
    blocks = [
        checkpoint(function, row_block, index_block, *weights, use_reentrant=False, preserve_rng_state=False)
        for row_block, index_block in zip(rows.split(size), index.split(size), strict=True)
    ]
    first, second = zip(*blocks, strict=True)
    return torch.cat(first), torch.cat(second)


def project_and_pick(f: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``pick_logit`` of an output matrix."""
    return pick_logit(F.linear(f, weight), index)


class Softmax(nn.Module):
    """Plain softmax (Eq. 1); the output matrix is tied to the input table, or separate."""

    def __init__(self, embedding: PlainInput, tied: bool = True):
        super().__init__()
        self.vocabulary = embedding.vocabulary
        self.weight = embedding.table.weight if tied else nn.Parameter(torch.empty_like(embedding.table.weight))
        if not tied:
            nn.init.normal_(self.weight, std=embedding.width**-0.5)

    def mass(self, f: Float[Tensor, "n d"], target: Int[Tensor, " n"]) -> LogMass:
        """Return the vocabulary's mass: the target's logit and the logsumexp of all logits."""
        return LogMass(*in_blocks(project_and_pick, self.vocabulary, f, target, self.weight))

    def log_probs(self, f: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Return the log-probability of every token, for generation."""
        return F.linear(f, self.weight).log_softmax(1)


class AdaptiveSoftmax(nn.Module):
    """Adaptive softmax (Grave et al. 2017), with tables and projections tied to the adaptive input.

    The head holds the words of the first band and one class row for each tail band. ``total`` is the head's logsumexp T, and a
    tail word's logit is log p + T: the vocabulary enters Eq. 5 with the mass of the head only. Without ``tied_projections``
    each tail has a projection of its own. ``dropped_in_band`` is the published code's quirk: the second word of each tail (its
    ignore_index) gets only the logit of its class.
    """

    def __init__(
        self, embedding: AdaptiveInput, tied_projections: bool = True, dropout: float = 0.0, dropped_in_band: bool = False
    ):
        super().__init__()
        self.dropped_in_band = dropped_in_band
        self.bands, self.tables = embedding.bands, embedding.tables
        self.dropout = nn.Dropout(dropout)
        self.classes = nn.Parameter(torch.empty(len(self.bands) - 1, embedding.width))
        if len(self.bands) > 1:
            nn.init.xavier_uniform_(self.classes)
        self.tied, self.is_sharded = tied_projections, False  # by FSDP
        self.projections = embedding.projections
        if not tied_projections:
            empty = (torch.empty(table.shape[1], embedding.width) for table in self.tables[1:])
            self.projections = nn.ParameterList(map(nn.init.xavier_uniform_, empty))

    def project(self, band: int, f: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
        """Project f to the width of a tail band (bands count from 0, tails from 1)."""
        weight = self.projections[band].T if self.tied else self.projections[band - 1]
        return self.dropout(F.linear(f, weight))

    def head(self) -> Float[Tensor, "v d"]:
        """Return the output matrix of the first band's words and the classes."""
        return torch.cat([self.tables[0], self.classes])

    def mass(self, f: Float[Tensor, "n d"], target: Int[Tensor, " n"]) -> LogMass:
        """Return the vocabulary's mass: total T of the head, and log p + T of the target."""
        f = self.dropout(f)
        first = self.bands[0][1]
        index = target.clamp(max=first - 1)
        for band, (low, high) in enumerate(self.bands[1:]):
            index = torch.where((target >= low) & (target < high), first + band, index)
        logit, total = in_blocks(project_and_pick, first + len(self.classes), f, index, self.head())
        for band, (low, high) in list(enumerate(self.bands))[1:]:
            member = (target >= low) & (target < high)
            if self.dropped_in_band:
                member &= target != low + 1
            inside = member.nonzero().squeeze(1)
            # FSDP needs a gradient of every weight on every device, though no target may lie in this band.
            if len(inside) or self.is_sharded:
                tail = self.project(band, f[inside])
                tail_logit, tail_total = in_blocks(project_and_pick, high - low, tail, target[inside] - low, self.tables[band])
                logit = logit.index_add(0, inside, tail_logit - tail_total)
        return LogMass(logit, total)

    def log_probs(self, f: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Return the log-probability of every token, for generation."""
        first = self.bands[0][1]
        head = F.linear(f, self.head()).log_softmax(1)
        tails = [
            head[:, first + band - 1, None] + F.linear(self.project(band, f), self.tables[band]).log_softmax(1)
            for band in range(1, len(self.bands))
        ]
        return torch.cat([head[:, :first], *tails], 1)


def pick_logit(logits: Float[Tensor, "n v"], index: Int[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return the logit at the index, and the logsumexp of each row, in float32 or higher precision."""
    kernels = kernels_for(logits)
    if kernels is not None:
        return _Pick.apply(logits.contiguous(), index, kernels)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(1, index[:, None]).squeeze(1), logits.logsumexp(1)


def kernels_for(logits: Tensor) -> ModuleType | None:
    """Return the module of kernels for logits of this device and type; None where the definition is used."""
    if logits.device.type not in ("cpu", "cuda") or logits.dtype == torch.float64 or not logits.numel():
        return None
    if not logits.is_cuda:
        return pick_cpu
    try:
        from trime.layers import pick_cuda
    except ImportError:  # on some systems torch for CUDA comes without triton
        return None
    return pick_cuda


class _Pick(torch.autograd.Function):
    """``pick_logit`` by kernels, which make no further tensor of the logits' size but their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, kernels: Any) -> tuple[Tensor, Tensor]:
        picked, total = kernels.forward(logits, index)
        ctx.save_for_backward(logits, index, total)
        ctx.kernels = kernels
        return picked, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_picked: Tensor, grad_total: Tensor) -> tuple[Tensor, None, None]:
        logits, index, total = ctx.saved_tensors
        return ctx.kernels.backward(logits, index, total, grad_picked, grad_total), None, None
