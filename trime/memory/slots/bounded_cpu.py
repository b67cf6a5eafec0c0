"""Which entries a bounded memory keeps, on the CPU: one pass over the candidates, in place of some twenty small steps."""

from __future__ import annotations

import numpy as np
import torch

from trime.common.numba_kernels import numba_jit, run_kernel
from trime.common.types import Float, Int, Ranking, Tensor


def rank_on_cpu(
    old: Ranking,
    candidates: Int[Tensor, "b c"],
    competing: Float[Tensor, "b c"],
    score: Float[Tensor, "b n"],
    newest_first: bool,
) -> tuple[Int[Tensor, " w"], Int[Tensor, " w"], Ranking]:
    """Return the slots that new entries are written to and which entries those are, over all rows, and the ranking after it.

    The last n ``candidates`` are the positions of new entries, which enter with ``score``; the others are in the slots of the
    memory, -1 if empty. Those of the lowest ``competing`` scores go until the rest fits, of equal ones the oldest, or the
    newest without ``newest_first``.
    """
    (b, size), new = old.position.shape, score.shape[1]
    slot, source = (torch.empty(b, min(new, size), dtype=torch.long) for _ in range(2))
    position, scores, attended, written = (part.detach().clone() for part in (*old[:3], old.written))
    ranks = (position, scores, attended, written)
    count = run_kernel(rank_kernel, candidates, competing, score, newest_first, *ranks, slot, source)
    return slot.view(-1)[:count], source.view(-1)[:count], Ranking(position, scores, attended, old.clock, written)


@numba_jit()
def rank_kernel(  # type: ignore[no-untyped-def]
    candidates, competing, score, newest_first, position, scores, attended, written, slot, source
):
    """Write the new entries that are kept into a ranking, list their slots and numbers, and return how many there are."""
    (b, size), new = position.shape, score.shape[1]
    valid = np.empty(slot.shape, np.bool_)
    choose_kernel(candidates, competing, size, newest_first, slot, source, valid)
    slots, sources, count = slot.ravel(), source.ravel(), 0
    for row in range(b):
        for j in range(new):
            written[row] += candidates[row, size + j] >= 0
        for j in range(slot.shape[1]):
            if valid[row, j]:
                place, entry = slot[row, j], source[row, j]
                position[row, place], scores[row, place] = candidates[row, size + entry], score[row, entry]
                attended[row, place] = False
                slots[count], sources[count] = row * size + place, row * new + entry  # never beyond what is read
                count += 1
    return count


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
