"""The mass of retrieved entries under many temperatures on the CPU: each exponential once, and no tensor of all of them."""

from __future__ import annotations

import numpy as np
from numba import prange

from trime.types import Float, Int, Mass, Tensor
from trime.vectors import compiled, exponentials, on_threads


def masses(
    score: Float[Tensor, "n k"], token: Int[Tensor, "n k"], target: Int[Tensor, " n"], divisor: Float[Tensor, " t"]
) -> Mass:
    """Mass [t n] of entries for targets."""
    found = score.new_empty(2, len(divisor), len(target))
    on_threads(add_up, score.contiguous(), token.contiguous(), target, divisor.float(), *found)
    return Mass(*found)


@compiled(parallel=True, reorder=True)
def add_up(score, token, target, divisor, of_target, total):  # type: ignore[no-untyped-def]
    for row in prange(len(score)):
        own, hits = np.empty(score.shape[1], np.float32), 0
        for j in range(score.shape[1]):
            if token[row, j] == target[row]:
                own[hits] = score[row, j]
                hits += 1
        out = np.empty(score.shape[1], np.float32)
        bits = np.empty(score.shape[1], np.int32)
        top, most = largest(score[row]), largest(own[:hits])
        for t in range(len(divisor)):
            scale = np.float32(1) / divisor[t]
            total[t, row] = log_sum(score[row], scale, top, out, bits)
            of_target[t, row] = log_sum(own[:hits], scale, most, out[:hits], bits[:hits])


@compiled()
def largest(scores):  # type: ignore[no-untyped-def]
    top = np.float32(-np.inf)
    for x in scores:
        top = max(top, x)
    return top


@compiled(reorder=True)
def log_sum(scores, scale, top, out, bits):  # type: ignore[no-untyped-def]
    """log of the sum of e^(scale x), of which the largest x is ``top``; -inf of nothing."""
    if top == -np.inf:
        return top
    exponentials(scores, scale, scale * top, out, bits, bits.view(np.float32))
    whole = np.float32(0)
    for x in out:
        whole += x
    return scale * top + np.log(whole)
