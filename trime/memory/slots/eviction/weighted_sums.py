"""Sums of scores over the queries and heads of a block, entry by entry, for the policies that add scores up."""

from __future__ import annotations

import torch
from numba import prange

from trime.common.numba_kernels import HIDDEN, numba_jit, run_kernel
from trime.common.types import AttentionBlock, Bool, Float, Tensor

COLUMNS = 512  # entries that a thread adds up at a time


def weighted_sums(
    block: AttentionBlock, importance: Float[Tensor, "b h q m"], weight: Float[Tensor, "b q"]
) -> tuple[Float[Tensor, "b m"], Bool[Tensor, "b m"]]:
    """Return sum_q weight_q sum_h importance in float64, over what each query sees, and the entries that any query sees."""
    score = block.score
    plain = score.device.type == "cpu" and score.dtype == importance.dtype == torch.float32
    if not plain or (block.position < 0).any():
        by_query = importance.masked_fill(~block.visible, 0.0).sum(1, dtype=torch.float64)
        return (weight[:, None] @ by_query).squeeze(1), block.visible.any(2).any(1)
    total = torch.zeros(score.shape[0], score.shape[3], dtype=torch.float64)
    seen = torch.zeros_like(total, dtype=torch.bool)
    run_kernel(sum_kernel, score, importance, weight, total, seen)
    return total, seen


@numba_jit(parallel=True)
def sum_kernel(score, importance, weight, total, seen):  # type: ignore[no-untyped-def]
    """Add up what queries see, in the order of heads and queries, in blocks of columns."""
    b, h, q, m = score.shape
    blocks = -(-m // COLUMNS)
    for item in prange(b * blocks):
        row, first = item // blocks, item % blocks * COLUMNS
        last = min(first + COLUMNS, m)
        sums, count = total[row, first:last], seen[row, first:last]
        for i in range(q):
            factor = weight[row, i]
            for head in range(h):
                scores, values = score[row, head, i, first:last], importance[row, head, i, first:last]
                for j in range(last - first):
                    sees = scores[j] > HIDDEN
                    sums[j] += factor * values[j] if sees else 0.0
                    count[j] |= sees
