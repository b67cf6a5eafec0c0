"""Which entries a bounded memory keeps, on the CPU: one pass over the candidates, in place of some twenty small steps."""

from __future__ import annotations

import numpy as np
import torch

from trime.kernels.numba_kernels import numba_jit, run_kernel
from trime.types import Bool, Float, Int, Tensor


def choose_on_cpu(
    position: Int[Tensor, "b c"], score: Float[Tensor, "b c"], size: int, new: int, newest_first: bool
) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
    """Return the slots that new entries are written to, which entries those are, and where there is one to write.

    The last ``new`` candidates are new; the others are in the slots of a memory of ``size``, -1 if empty. Those of the lowest
    scores go until the rest fits, of equal ones the oldest, or the newest without ``newest_first``.
    """
    count = min(new, size)
    slot, source = (torch.empty(len(position), count, dtype=torch.long) for _ in range(2))
    valid = torch.empty(len(position), count, dtype=torch.bool)
    run_kernel(choose_kernel, position, score, size, newest_first, slot, source, valid)
    return slot, source, valid


@numba_jit()
def choose_kernel(position, score, size, newest_first, slot, source, valid):  # type: ignore[no-untyped-def]
    """Fill ``slot``, ``source`` and ``valid`` of each row."""
    candidates, slots = position.shape[1], min(size, position.shape[1])
    kept, heap = np.empty(candidates, np.bool_), np.empty(candidates, np.int64)
    for row in range(len(position)):
        filled = 0
        for j in range(candidates):
            kept[j] = position[row, j] >= 0
            filled += kept[j]
        evicted = filled - size
        if evicted > 0:
            worst_of(position[row], score[row], newest_first, heap[:evicted])
            for j in range(evicted):
                kept[heap[j]] = False
        list_first(kept[:slots], False, slot[row])
        list_first(kept[slots:], True, source[row])
        for j in range(len(valid[row])):
            valid[row, j] = kept[slots + source[row, j]]


@numba_jit()
def list_first(flags, wanted, out):  # type: ignore[no-untyped-def]
    """Write the indices of the flags that are as wanted to ``out``, then those of the others, as far as there is room."""
    count = 0
    for value in (wanted, not wanted):
        for j in range(len(flags)):
            if count < len(out) and flags[j] == value:
                out[count] = j
                count += 1


@numba_jit()
def worst_of(position, score, newest_first, heap):  # type: ignore[no-untyped-def]
    """Fill ``heap`` with the worst filled candidates: a heap with the best of them at its root, which a worse one replaces."""
    count = 0
    for j in range(len(position)):
        if position[j] < 0:
            continue
        if count < len(heap):
            child = count
            count += 1
            while child > 0 and is_worse(position, score, newest_first, heap[(child - 1) // 2], j):
                heap[child] = heap[(child - 1) // 2]
                child = (child - 1) // 2
            heap[child] = j
        elif is_worse(position, score, newest_first, j, heap[0]):
            place = 0
            while 2 * place + 1 < count:
                child = 2 * place + 1
                if child + 1 < count and is_worse(position, score, newest_first, heap[child], heap[child + 1]):
                    child += 1
                if not is_worse(position, score, newest_first, j, heap[child]):
                    break
                heap[place] = heap[child]
                place = child
            heap[place] = j


@numba_jit()
def is_worse(position, score, newest_first, one, other):  # type: ignore[no-untyped-def]
    """Return True if a candidate goes before another."""
    if score[one] != score[other]:
        return score[one] < score[other]
    return position[one] < position[other] if newest_first else position[one] > position[other]
