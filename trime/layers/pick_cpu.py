"""The target's logit and the logsumexp of each row on a CPU, some rows at a time, which its cache holds.

Passes over all logits at once, of which autograd makes ten, wait for memory: they take two to three times as long.
"""

from __future__ import annotations

import torch

from trime.common.types import Tensor

LOGITS = 2**19  # at a time: 2 MiB in float32


def forward(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logit at the index, and the logsumexp of each row, in float32."""
    picked = logits.gather(1, index[:, None]).squeeze(1).float()
    return picked, torch.cat([part.float().logsumexp(1) for part in logits.split(rows(logits))])


def backward(logits: Tensor, index: Tensor, total: Tensor, grad_picked: Tensor, grad_total: Tensor) -> Tensor:
    """Return the gradient of the logits, in their type."""
    gradient = torch.empty_like(logits)
    parts = (tensor.split(rows(logits)) for tensor in (logits, index[:, None], total, grad_picked, grad_total, gradient))
    for logit, place, mass, to_picked, to_total, out in zip(*parts, strict=True):
        slope = (logit.float() - mass[:, None]).exp_().mul_(to_total[:, None])
        out.copy_(slope.scatter_add_(1, place, to_picked[:, None]))
    return gradient


def rows(logits: Tensor) -> int:
    """Return the number of rows to read at a time."""
    return max(1, LOGITS // logits.shape[1])
