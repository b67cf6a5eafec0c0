"""Counts of what followed the last k tokens, for several k: in a text by its suffix array, in a document while it is read.

The suffixes that begin with some tokens stand side by side in a suffix array, so that binary search counts them. In a
document that grows, counts stand in a hash table under the hash of the tokens.
"""

from __future__ import annotations

import numpy as np

from trime.kernels.numba_kernels import numba_jit

FACTOR, START, NEXT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x2545F4914F6CDD1D), np.uint64(0xBF58476D1CE4E5B9)
HALF = np.uint64(32)
ONE = np.uint64(1)


@numba_jit()
def compare_tokens(text, at, tokens, begin, first, end):  # type: ignore[no-untyped-def]
    """-1, 0 or 1: how text[at + first : at + end] compares with tokens[begin + first : begin + end].

    A text that ends before is the smaller.
    """
    for j in range(first, end):
        if at + j >= len(text):
            return -1
        one, other = np.int64(text[at + j]), tokens[begin + j]
        if one != other:
            return -1 if one < other else 1
    return 0


@numba_jit()
def bound(text, array, low, high, tokens, begin, first, end, least):  # type: ignore[no-untyped-def]
    """The first place in array[low : high] whose suffix compares as ``least`` or more with the tokens.

    ``least`` 0 finds where equal ones begin, 1 where they end.
    """
    while low < high:
        middle = (low + high) // 2
        if compare_tokens(text, array[middle], tokens, begin, first, end) < least:
            low = middle + 1
        else:
            high = middle
    return low


@numba_jit()
def suffix_range(text, array, starts, history, begin, length):  # type: ignore[no-untyped-def]
    """Where in the suffix array the suffixes stand that begin with history[begin : begin + length]."""
    low, high = starts[history[begin]], starts[history[begin] + 1]  # of the first token nothing is left to compare
    low = bound(text, array, low, high, history, begin, 1, length, 0)
    return low, bound(text, array, low, high, history, begin, 1, length, 1)


@numba_jit()
def count_followed_by(text, array, low, high, length, target, i):  # type: ignore[no-untyped-def]
    """How many of the suffixes have target[i] after their first ``length`` tokens."""
    low = bound(text, array, low, high, target, i - length, length, length + 1, 0)
    return bound(text, array, low, high, target, i - length, length, length + 1, 1) - low


@numba_jit()
def counts_in_text(text, array, starts, history, first, target, orders, of_target, total):  # type: ignore[no-untyped-def]
    """total[q, i]: how often the ``orders[q]`` tokens before history[first + i] occur; of_target[q, i]: before target[i]."""
    for i in range(len(target)):
        place = first + i
        for q in range(len(orders)):
            length = orders[q]
            if length > place:
                break
            low, high = suffix_range(text, array, starts, history, place - length, length)
            if low == high:
                break
            of_target[q, i] = count_followed_by(text, array, low, high, length, target, i)
            total[q, i] = high - low - (array[low] + length >= len(text))  # the text's end is followed by nothing


@numba_jit()
def mix_hash(hashed, token):  # type: ignore[no-untyped-def]
    hashed = (hashed ^ (np.uint64(token) + ONE)) * FACTOR
    return hashed ^ (hashed >> HALF)


@numba_jit()
def find_slot(keys, key):  # type: ignore[no-untyped-def]
    """The slot that holds a key, or the free one where it belongs; the number of slots is a power of two."""
    last = np.uint64(len(keys) - 1)
    slot = key & last
    while keys[slot] != 0 and keys[slot] != key:
        slot = (slot + ONE) & last
    return slot


@numba_jit()
def counts_in_document(keys, counts, history, first, target, orders, of_target, total, added):  # type: ignore[no-untyped-def]
    """As counts_in_text, of the tokens before each one; each history[first + i] is counted after its turn.

    ``added`` takes the slots whose counts went up, so that this can be undone; returned is how many there are.
    """
    done = 0
    for i in range(len(target)):
        place = first + i
        for q in range(len(orders)):
            length = orders[q]
            if length > place:
                break
            hashed = START + np.uint64(length)
            for j in range(place - length, place):
                hashed = mix_hash(hashed, history[j])
            context = hashed | ONE
            total[q, i] = counts[find_slot(keys, context)]
            of_target[q, i] = counts[find_slot(keys, mix_hash(hashed ^ NEXT, target[i]) | ONE)]
            for key in (context, mix_hash(hashed ^ NEXT, history[place]) | ONE):
                slot = find_slot(keys, key)
                keys[slot] = key
                counts[slot] += 1
                added[done] = slot
                done += 1
    return done


@numba_jit()
def rehash(keys, counts, new_keys, new_counts):  # type: ignore[no-untyped-def]
    """Enter what a table holds into a larger one; returned is how many slots are taken."""
    taken = 0
    for slot in range(len(keys)):
        if counts[slot]:
            new = find_slot(new_keys, keys[slot])
            new_keys[new], new_counts[new] = keys[slot], counts[slot]
            taken += 1
    return taken
