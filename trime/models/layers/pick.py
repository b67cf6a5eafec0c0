"""The target's logit and the logsumexp of each row of logits: all that a language model's loss needs of them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trime.types import Float, Int, Tensor


def pick_logit(logits: Float[Tensor, "n v"], index: Int[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return the logit at the index, and the logsumexp of each row, in float32 or higher precision."""
    kernels = kernels_for(logits)
    if kernels is not None:
        return _Pick.apply(logits.contiguous(), index, kernels)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(1, index[:, None]).squeeze(1), logits.logsumexp(1)


def kernels_for(logits: Tensor) -> ModuleType | None:
    """Return the module of kernels for logits of this device and type; None where the definition is used."""
    if not logits.is_cuda or logits.dtype == torch.float64 or not logits.numel():
        return None
    try:
        from trime.models.layers import pick_cuda
    except ImportError:  # on some systems torch for CUDA comes without triton
        return None
    return pick_cuda


class _Pick(torch.autograd.Function):
    """``pick_logit`` by kernels that keep no further tensor of the logits' size."""

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
