"""Attention to the entries of a memory on the CPU, to all that a query sees or to its best k.

The k-th largest score of a query is found by counting, which vector instructions do at eight scores or more at a time: first
between which scores it lies, beginning with the k-th of the query before it, then among the few candidates that remain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import prange

from trime.common.numba_kernels import HALF, HIDDEN, ONE, ZERO, exponentials, numba_jit, run_kernel
from trime.common.types import Bool, Float, Int, Tensor
from trime.layers.attention import hide_

LOWEST, HIGHEST = np.finfo(np.float32).min, np.finfo(np.float32).max
ANY_POSITION = 2**31 - 1
MARGIN = np.float32(0.05)  # of the distance from the best score to the k-th, by which the next query's guess is lower
FIRST_STEP = np.float32(0.2)  # of that distance, by which a guess is first corrected


class Reach(NamedTuple):
    """The entries that a query sees: ``causal`` and ``window`` as in Attendre; beyond ``longest`` tokens other scores count.

    ``sees_all``: it is known that nothing is hidden.
    """

    causal: bool
    window: int | None = None
    longest: int | None = None
    sees_all: bool = False


class CPUAttention(NamedTuple):
    """The attended values of each query, and which entries it retrieved; None: all that it sees."""

    attended: Float[Tensor, "b h q d"]
    retrieved: Bool[Tensor, "b h q m"] | None


def runs_on_cpu(*tensors: Tensor) -> bool:
    """Return True where ``attend`` can be used: on the CPU, in float32, without a gradient."""
    gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not gradient and all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)


def attend(
    logits: Float[Tensor, "b h q m"],
    far: Float[Tensor, "b h q m"] | None,
    query_position: Int[Tensor, "b q"],
    key_position: Int[Tensor, "b m"],
    value: Float[Tensor, "b m g d"],
    top_k: int | None,
    reach: Reach,
) -> CPUAttention:
    """Return attention to each query's ``top_k`` best visible entries, or to all of them.

    ``logits`` are changed in place: beyond ``reach.longest`` those of ``far`` take their place, and hidden entries get -inf.
    Padding, at position -1, sees nothing and is not seen. Consecutive heads of queries share a head of values. A query that
    sees nothing has an output of 0.
    """
    if top_k is None:
        return CPUAttention(attend_to_all(logits, far, query_position, key_position, value, reach), None)
    b, h, q, _ = logits.shape
    window = ANY_POSITION if reach.window is None else reach.window
    other = (logits, ANY_POSITION) if far is None or reach.longest is None else (far, reach.longest)
    attended = logits.new_empty(b, q, h, value.shape[3])
    retrieved = torch.zeros_like(logits, dtype=torch.bool)
    seen = (*other, query_position.int(), key_position.int(), reach.causal, window)
    run_kernel(topk_kernel, logits, *seen, value.contiguous(), top_k, attended, retrieved)
    return CPUAttention(attended.transpose(1, 2), retrieved)


def attend_to_all(
    logits: Float[Tensor, "b h q m"],
    far: Float[Tensor, "b h q m"] | None,
    query_position: Int[Tensor, "b q"],
    key_position: Int[Tensor, "b m"],
    value: Float[Tensor, "b m g d"],
    reach: Reach,
) -> Float[Tensor, "b h q d"]:
    """Return the values of ``attend`` without a ``top_k``, by PyTorch: a kernel of our own is 1.0 to 1.5 times as fast."""
    empty = None
    if not reach.sees_all:
        at, of = query_position.int()[:, :, None], key_position.int()[:, None]
        hidden = (of < 0) | (at < 0)
        if reach.causal:
            hidden |= of > at
        if reach.window is not None:
            hidden |= (at - of).abs() >= reach.window
        if far is not None and reach.longest is not None:
            torch.where((at - reach.longest > of)[:, None], far, logits, out=logits)
        hide_(logits, hidden[:, None])
        empty = hidden.all(-1)[:, None, :, None]
    weight = logits.softmax(-1)
    if empty is not None and bool(empty.any()):  # the softmax of nothing is NaN
        weight.masked_fill_(empty, 0.0)
    grouped, values = weight.unflatten(1, (value.shape[2], -1)).flatten(2, 3), value.transpose(1, 2)
    # Row by row: a product of all rows at once would copy the values.
    rows = [of_row @ entries for of_row, entries in zip(grouped, values, strict=True)]
    return torch.stack(rows).unflatten(2, (-1, logits.shape[2])).flatten(1, 2)


@numba_jit(parallel=True)
def topk_kernel(  # type: ignore[no-untyped-def]
    logits, far, longest, query_position, key_position, causal, window, value, k, attended, retrieved
):
    """Hide the entries in ``logits`` that a query may not see, and fill ``attended`` and ``retrieved``, head by head."""
    b, h, q, m = logits.shape
    shared, most = h // value.shape[2], min(2 * k, m)
    for item in prange(b * h):
        row, head = item // h, item % h
        slots, candidates = np.empty(m + 1, np.int32), np.empty(m, np.float32)
        weight, bits = np.empty(m, np.float32), np.empty(m, np.int32)
        power = bits.view(np.float32)
        guess, step = ZERO, ONE
        for i in range(q):
            scores, out = logits[row, head, i], attended[row, i, head]
            select_seen(scores, far[row, head, i], query_position[row, i], key_position[row], longest, causal, window)
            least = LOWEST
            if count_from(scores, LOWEST) > k:
                least = threshold(scores, k, most, guess, step)
            count = collect(scores, least, slots, candidates)
            out[:] = ZERO
            if count == 0:
                continue
            best = candidates[:count].max()
            if count > k:
                least = kth_largest(candidates[:count], k, least, best)
                guess, step = least - MARGIN * (best - least), FIRST_STEP * (best - least) + np.float32(1e-6)
                count = keep_best(candidates, slots, count, least, k)
            exponentials(candidates[:count], ONE, best, weight[:count], bits[:count], power[:count])
            total = ZERO
            for j in range(count):
                total += weight[j]
                entry = value[row, slots[j], head // shared]
                for c in range(len(out)):
                    out[c] += weight[j] * entry[c]
                retrieved[row, head, i, slots[j]] = True
            for c in range(len(out)):
                out[c] /= total


@numba_jit()
def select_seen(scores, far, at, position, longest, causal, window):  # type: ignore[no-untyped-def]
    """Hide the scores of entries that a query at ``at`` does not see; for those beyond ``longest`` the scores ``far`` count."""
    place = np.int64(at)
    low = np.int32(max(place - window, -1))
    high = np.int32(place if causal or place < 0 else min(place + window - 1, ANY_POSITION))
    edge = np.int32(max(place - longest, -1))
    for j in range(len(scores)):
        of, near, other = position[j], scores[j], far[j]  # all are read, so that vector instructions can select
        score = other if of < edge else near
        scores[j] = score if (of > low) & (of <= high) else HIDDEN


@numba_jit()
def count_from(scores, least):  # type: ignore[no-untyped-def]
    """Count the scores that are at least ``least``."""
    count = np.int32(0)
    for j in range(len(scores)):
        count += np.int32(scores[j] >= least)
    return count


@numba_jit()
def threshold(scores, k, most, guess, step):  # type: ignore[no-untyped-def]
    """Return a score from which on there are at least ``k`` scores, and ``most`` or few more.

    More than ``k`` scores are not hidden. The search goes from ``guess`` in steps that double, then halves what remains; where
    many scores are equal, the largest such score is returned.
    """
    low, high = LOWEST, HIGHEST
    if not (LOWEST < guess < HIGHEST and step < HIGHEST):  # after a score that overflowed
        guess, step = ZERO, ONE
    while True:
        count = count_from(scores, guess)
        if k <= count <= most:
            return guess
        if count > most:
            low = guess
        else:
            high = guess
        if high == HIGHEST and guess + step < HIGHEST:
            guess, step = guess + step, step + step
        elif low == LOWEST and guess - step > LOWEST:
            guess, step = guess - step, step + step
        else:
            guess = HALF * low + HALF * high
            if guess <= low or guess >= high:
                return low


@numba_jit()
def kth_largest(candidates, k, low, high):  # type: ignore[no-untyped-def]
    """Return a score from which on there are ``k`` candidates, or the k-th largest score if others equal it.

    At least ``k`` candidates reach ``low``, and none is above ``high``.
    """
    if count_from(candidates, high) >= k:
        return high
    while True:
        middle = HALF * low + HALF * high
        if middle <= low or middle >= high:
            return low
        count = count_from(candidates, middle)
        if count >= k:
            low = middle
        else:
            high = middle
        if count == k:
            return low


@numba_jit()
def collect(scores, least, slots, candidates):  # type: ignore[no-untyped-def]
    """Write the slots of the scores from ``least`` on, and those scores; return their number. There are no branches."""
    count = 0
    for j in range(len(scores)):
        slots[count] = j
        count += scores[j] >= least
    for j in range(count):
        candidates[j] = scores[slots[j]]
    return count


@numba_jit()
def keep_best(candidates, slots, count, least, k):  # type: ignore[no-untyped-def]
    """Keep the ``k`` largest candidates, none of them below ``least``; of those equal to it the first. Return their number."""
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
