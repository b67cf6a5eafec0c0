"""The mass of retrieved entries at many temperatures on the CPU, without a tensor of all exponentials."""

from __future__ import annotations

import numpy as np
from numba import prange

from trime.kernels.numba_kernels import LANES, exponentials, lane_sum, numba_jit, run_kernel
from trime.types import Float, Int, LogMass, Tensor


def entry_masses(
    score: Float[Tensor, "n k"],
    token: Int[Tensor, "n k"] | Int[Tensor, " k"],
    target: Int[Tensor, " n"],
    divisor: Float[Tensor, " t"],
) -> LogMass:
    """Return the mass [t n] of entries, separate ones for each target or shared by all; a score of -inf is no entry."""
    masses = score.new_empty(2, len(divisor), len(target))
    kernel = add_up if token.ndim == 2 else add_up_shared
    run_kernel(kernel, score.contiguous(), token.contiguous(), target, divisor.float(), *masses)
    return LogMass(*masses)


@numba_jit(parallel=True)
def add_up(score, token, target, divisor, of_target, total):  # type: ignore[no-untyped-def]
    """Write the log-masses of all queries, each with its own tokens."""
    for row in prange(len(score)):
        add_row(score[row], token[row], target[row], divisor, of_target[:, row], total[:, row])


@numba_jit(parallel=True)
def add_up_shared(score, token, target, divisor, of_target, total):  # type: ignore[no-untyped-def]
    """Write the log-masses of all queries, which share their tokens."""
    for row in prange(len(score)):
        add_row(score[row], token, target[row], divisor, of_target[:, row], total[:, row])


@numba_jit()
def add_row(score, token, target, divisor, of_target, total):  # type: ignore[no-untyped-def]
    """Write the log-masses [t] of one query's entries: of those with its target, and of all."""
    target_scores, hits = np.empty(len(score), np.float32), 0
    for j in range(len(score)):
        if token[j] == target:
            target_scores[hits] = score[j]
            hits += 1
    out, bits = np.empty(len(score), np.float32), np.empty(len(score), np.int32)
    log_sum_exps(score, divisor, out, bits, total)
    log_sum_exps(target_scores[:hits], divisor, out[:hits], bits[:hits], of_target)


@numba_jit()
def log_sum_exps(scores, divisor, out, bits, result):  # type: ignore[no-untyped-def]
    """Write log Σ e^(x / d) for each divisor d, -inf without scores; where d is half of the next one, e is squared."""
    top, before, lanes = largest(scores), np.float32(0), np.empty(LANES, np.float32)
    for t in range(len(divisor) - 1, -1, -1):
        scale = np.float32(1) / divisor[t]
        if top == -np.inf:
            result[t] = top
            continue
        if abs(scale - 2 * before) <= np.float32(1e-6) * scale:
            for j in range(len(out)):
                out[j] *= out[j]
        else:
            exponentials(scores, scale, scale * top, out, bits, bits.view(np.float32))
        result[t] = scale * top + np.log(lane_sum(out, lanes))
        before = scale


@numba_jit()
def largest(scores):  # type: ignore[no-untyped-def]
    """Return the largest score, or -inf; eight running maxima let vector instructions compare at once."""
    tops = np.full(8, -np.inf, np.float32)
    end = len(scores) // 8 * 8
    for j in range(0, end, 8):
        for lane in range(8):
            tops[lane] = max(tops[lane], scores[j + lane])
    for j in range(end, len(scores)):
        tops[0] = max(tops[0], scores[j])
    return tops.max()
