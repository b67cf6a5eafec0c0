"""Causal attention in blocks of queries for training on a CPU: the products skip keys that no query of a block sees.

PyTorch's kernel for CPUs multiplies tiles that are too small for its matrix library: with it an update of a small model takes
1.3 times as long in float32, 1.5 times in bfloat16 (``python -m benchmarks pays``). Whole rows of a block are kept for the
backward pass, so that memory grows with the square of the length; ``worth_it`` says up to where that pays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from trime.common.types import Float, Tensor

BLOCKS = 8  # of queries
SHORTEST, LONGEST = 257, 1024  # positions between which it is faster than PyTorch's kernel, and small


def worth_it(query: Tensor, dropout: float) -> bool:
    """Return whether attention to these queries is faster in blocks: on a CPU, in training, at medium lengths."""
    kind = query.device.type == "cpu" and (query.dtype == torch.float32 or torch.is_autocast_enabled("cpu"))
    return kind and SHORTEST <= query.shape[-2] <= LONGEST and not dropout and torch.is_grad_enabled() and query.requires_grad


class CausalBlocks(torch.autograd.Function):
    """softmax(q k^T scale) v over a row's own and earlier positions; all [... l e].

    Under autocast it computes in float32: scores in bfloat16 would round sharp attention, and PyTorch's kernel does not.
    """

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(
        context: Any,
        query: Float[Tensor, "... l e"],
        key: Float[Tensor, "... l e"],
        value: Float[Tensor, "... l e"],
        scale: float,
    ) -> Float[Tensor, "... l e"]:
        shape = query.shape
        query, key, value = (each.reshape(-1, *shape[-2:]) for each in (scale * query, key, value))
        out, kept = torch.empty_like(query), []
        for first, last in blocks(shape[-2]):
            scores = query[:, first:last] @ key[:, :last].mT
            scores[..., first:] += scores.new_full((last - first, last - first), -torch.inf).triu_(1)
            kept.append(torch.softmax(scores, -1, out=scores))
            out[:, first:last] = scores @ value[:, :last]
        context.save_for_backward(query, key, value, *kept)
        context.scale, context.shape = scale, shape
        return out.view(shape)

    @staticmethod
    @once_differentiable
    @custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(context: Any, grad: Float[Tensor, "... l e"]) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, *kept = context.saved_tensors
        grad = grad.reshape(query.shape)
        to_query, to_key, to_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        # All blocks use the same memory: fresh pages would cost a quarter of the time. Products that add to a part of a
        # tensor would be done matrix by matrix.
        of_scores, of_keys = query.new_empty(kept[0].shape[:2].numel() * query.shape[1]), torch.empty_like(key).flatten()
        for (first, last), weight in zip(blocks(query.shape[1]), kept, strict=True):
            own, earlier = grad[:, first:last], of_keys[: key[:, :last].numel()].view_as(key[:, :last])
            to_value[:, :last] += torch.bmm(weight.mT, own, out=earlier)
            to_scores = torch.bmm(own, value[:, :last].mT, out=of_scores[: weight.numel()].view_as(weight))
            torch._softmax_backward_data(to_scores, weight, -1, weight.dtype, grad_input=to_scores)
            to_query[:, first:last] = to_scores @ key[:, :last]
            to_key[:, :last] += torch.bmm(to_scores.mT, query[:, first:last], out=earlier)
        return *(each.view(context.shape) for each in (to_query.mul_(context.scale), to_key, to_value)), None


def blocks(length: int) -> list[tuple[int, int]]:
    """Return the first position of each block of queries, and the one after its last."""
    rows = -(-length // BLOCKS)
    return [(first, min(length, first + rows)) for first in range(0, length, rows)]
