"""Attention to the top-k entries of a memory on the CPU: mask, search, softmax and weighted sum in one pass over each row.

The k-th largest score of a query is sought among the scores above a guess, which comes from the query before it: queries of
neighbouring tokens have similar scores, so that a few hundred candidates remain of thousands of entries.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import prange

from trime.kernels.numba_kernels import exponentials, numba_jit, run_kernel, select
from trime.types import Bool, Float, Int, Tensor

HIDDEN = np.float32(-np.inf)
ANY_POSITION = 2**31 - 1
MARGIN = 0.1  # of the distance from the largest score to the k-th, by which the next query's guess lies below its own k-th
MANY = 4  # times k: with more candidates than that, the next guess is nearer to the k-th score


class Reach(NamedTuple):
    """Which entries a query sees: ``causal`` and ``window`` as in Attendre; beyond ``longest`` tokens other scores count."""

    causal: bool
    window: int | None = None
    longest: int | None = None


class TopKAttention(NamedTuple):
    """The attended values of each query, and which entries it retrieved."""

    attended: Float[Tensor, "b h q d"]
    retrieved: Bool[Tensor, "b h q m"]


def runs_on_cpu(*tensors: Tensor) -> bool:
    """Return True where ``attend_topk`` can be used: on the CPU, in float32, without a gradient."""
    gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not gradient and all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)


def attend_topk(
    logits: Float[Tensor, "b h q m"],
    far: Float[Tensor, "b h q m"] | None,
    query_position: Int[Tensor, "b q"],
    key_position: Int[Tensor, "b m"],
    value: Float[Tensor, "b m g d"],
    top_k: int,
    reach: Reach,
) -> TopKAttention:
    """Return attention to each query's ``top_k`` best visible entries.

    ``logits`` are changed in place: beyond ``reach.longest`` those of ``far`` take their place, and hidden entries get -inf.
    Padding, at position -1, sees nothing and is not seen. Consecutive heads of queries share a head of values. A query that
    sees nothing has an output of 0.
    """
    b, h, q, _ = logits.shape
    attended = logits.new_empty(b, h, q, value.shape[3])
    retrieved = torch.zeros_like(logits, dtype=torch.bool)
    window = ANY_POSITION if reach.window is None else reach.window
    other = (logits, ANY_POSITION) if far is None or reach.longest is None else (far, reach.longest)
    positions = query_position.int(), key_position.int()
    arguments = (*other, *positions, value.contiguous(), top_k, reach.causal, window, attended, retrieved)
    run_kernel(topk_kernel, logits, *arguments)
    return TopKAttention(attended, retrieved)


@numba_jit(parallel=True)
def topk_kernel(  # type: ignore[no-untyped-def]
    logits, far, longest, query_position, key_position, value, k, causal, window, attended, retrieved
):
    """Fill ``attended`` and ``retrieved``, and hide in ``logits`` what a query may not see, head by head."""
    b, h, q, m = logits.shape
    shared = h // value.shape[2]
    for item in prange(b * h):
        row, head = item // h, item % h
        candidates, slots = np.empty(m + 1, np.float32), np.empty(m + 1, np.int32)
        scratch, order = np.empty(m + 1, np.float32), np.empty(m + 1, np.int32)
        weight = np.empty(k, np.float32)
        bits = np.empty(k, np.int32)
        power = bits.view(np.float32)
        guess, margin = HIDDEN, np.float32(MARGIN)
        for i in range(q):
            scores = logits[row, head, i]
            at = np.int64(query_position[row, i])
            first, last = max(at - window, -1), at if causal else min(at + window - 1, ANY_POSITION)
            select_seen(scores, far[row, head, i], key_position[row], first, last if at >= 0 else -1, at - longest)
            count = above(scores, guess, candidates, slots)
            if count < k and guess > HIDDEN:
                count, margin = above(scores, HIDDEN, candidates, slots), 2 * margin
            best = candidates[:count].max() if count else HIDDEN
            if count > k:
                scratch[:count] = candidates[:count]
                least = select(scratch, order, k, count)
                margin = np.float32(0.7) * margin if count > MANY * k else margin
                guess = least - margin * (best - least)
                count = keep_best(candidates, slots, count, least, k)
            else:
                guess = HIDDEN
            out = attended[row, head, i]
            out[:] = np.float32(0)
            if count:
                exponentials(candidates[:count], np.float32(1), best, weight[:count], bits[:count], power[:count])
                total = np.float32(0)
                for j in range(count):
                    total += weight[j]
                    entry = value[row, slots[j], head // shared]
                    for c in range(len(out)):
                        out[c] += weight[j] * entry[c]
                    retrieved[row, head, i, slots[j]] = True
                for c in range(len(out)):
                    out[c] /= total


@numba_jit()
def select_seen(scores, far, position, first, last, near):  # type: ignore[no-untyped-def]
    """Hide the scores of entries that are not after ``first`` and up to ``last``; before ``near`` those of ``far`` count."""
    low, high, edge = np.int32(first), np.int32(last), np.int32(max(near, -1))
    for j in range(len(scores)):
        place = position[j]
        score = far[j] if place < edge else scores[j]
        scores[j] = score if (place > low) & (place <= high) else HIDDEN


@numba_jit()
def above(scores, guess, candidates, slots):  # type: ignore[no-untyped-def]
    """Write the scores from ``guess`` on that are not hidden, and their slots, without branches; return their number."""
    count = 0
    for j in range(len(scores)):
        candidates[count] = scores[j]
        slots[count] = j
        count += (scores[j] >= guess) & (scores[j] > HIDDEN)
    return count


@numba_jit()
def keep_best(candidates, slots, count, least, k):  # type: ignore[no-untyped-def]
    """Keep the ``k`` largest candidates, of which ``least`` is the smallest; of equal ones the first. Return their number."""
    larger = 0
    for j in range(count):
        larger += candidates[j] > least
    equal, kept = k - larger, 0
    for j in range(count):
        is_equal = candidates[j] == least
        if candidates[j] > least or (is_equal and equal > 0):
            equal -= is_equal
            candidates[kept], slots[kept] = candidates[j], slots[j]
            kept += 1
    return kept
