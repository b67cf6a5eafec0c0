"""The target's logit and the logsumexp of each row on a CUDA device, in Triton: logits are read once, and once for gradients.

PyTorch's own kernels read and write them a dozen times. Tested on the CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from trime.common.triton_kernels import triton_jit
from trime.common.types import Tensor

COLUMNS = 4096  # that a program reads at a time


def forward(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logit at the index, and the logsumexp of each row, in float32."""
    picked, total = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    _forward[(len(logits),)](logits, logits.shape[1], index, picked, total, COLUMNS, num_warps=8)
    return picked, total


def backward(logits: Tensor, index: Tensor, total: Tensor, grad_picked: Tensor, grad_total: Tensor) -> Tensor:
    """Return the gradient of the logits, in their type."""
    gradient, blocks = torch.empty_like(logits), triton.cdiv(logits.shape[1], COLUMNS)
    _backward[(len(logits), blocks)](
        *(logits, logits.shape[1], index, total, grad_picked.contiguous(), grad_total.contiguous(), gradient, COLUMNS),
        num_warps=8,
    )
    return gradient


@triton_jit
def _forward(logits, width, index, picked, total, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    top, mass = tl.full([1], -math.inf, tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        logit = tl.load(logits + row * width + column, column < width, -math.inf).to(tl.float32)
        new = tl.maximum(top, tl.max(logit, 0))
        finite = tl.where(new == -math.inf, 0.0, new)
        mass = mass * tl.exp(top - finite) + tl.sum(tl.exp(logit - finite), 0)
        top = new
    only = tl.arange(0, 1)
    tl.store(total + row + only, top + tl.log(mass))
    tl.store(picked + row, tl.load(logits + row * width + tl.load(index + row)).to(tl.float32))


@triton_jit
def _backward(  # type: ignore[no-untyped-def]
    logits, width, index, total, grad_picked, grad_total, gradient, columns: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    logit = tl.load(logits + row * width + column, column < width, -math.inf).to(tl.float32)
    slope = tl.exp(logit - tl.load(total + row)) * tl.load(grad_total + row)
    slope += tl.where(column == tl.load(index + row), tl.load(grad_picked + row), 0.0)
    tl.store(gradient + row * width + column, slope, column < width)
