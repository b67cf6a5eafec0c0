"""Counts of the tokens that followed the last k tokens, for several k: in a text by its suffix array, or in a growing document.

The suffixes that begin with given tokens are adjacent in a suffix array, so that binary search counts them. For a growing
document, a hash table maps hashes of tokens to counts.
"""

from __future__ import annotations

import numpy as np

from trime.common.numba_kernels import numba_jit

FACTOR, START, NEXT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x2545F4914F6CDD1D), np.uint64(0xBF58476D1CE4E5B9)
HALF_WIDTH = np.uint64(32)  # half of the bits of a hash
ONE_U64 = np.uint64(1)


@numba_jit()
def compare_tokens(text, at, tokens, begin, first, end):  # type: ignore[no-untyped-def]
    """Compare text[at + first : at + end] with tokens[begin + first : begin + end]: -1 if smaller, 0 if equal, 1 if larger.

    A text that ends first is the smaller one.
    """
    for j in range(first, end):
        if at + j >= len(text):
            return -1
        one, other = np.int64(text[at + j]), tokens[begin + j]
        if one != other:
            return -1 if one < other else 1
    return 0


@numba_jit()
def bound(text, array, low, high, tokens, begin, first, end, threshold):  # type: ignore[no-untyped-def]
    """Return the first index in array[low : high] whose suffix compares to the tokens as ``threshold`` or more.

    Threshold 0 finds where equal suffixes begin, 1 where they end.
    """
    while low < high:
        middle = (low + high) // 2
        if compare_tokens(text, array[middle], tokens, begin, first, end) < threshold:
            low = middle + 1
        else:
            high = middle
    return low


@numba_jit()
def suffix_range(text, array, starts, history, begin, length):  # type: ignore[no-untyped-def]
    """Return the range of the suffix array whose suffixes begin with history[begin : begin + length]."""
    low, high = starts[history[begin]], starts[history[begin] + 1]  # the first token matches in this range
    low = bound(text, array, low, high, history, begin, 1, length, 0)
    return low, bound(text, array, low, high, history, begin, 1, length, 1)


@numba_jit()
def count_followed_by(text, array, low, high, length, target, i):  # type: ignore[no-untyped-def]
    """Count the suffixes in a range that have target[i] after their first ``length`` tokens."""
    low = bound(text, array, low, high, target, i - length, length, length + 1, 0)
    return bound(text, array, low, high, target, i - length, length, length + 1, 1) - low


@numba_jit()
def followers(text, array, starts, low, high, length):  # type: ignore[no-untyped-def]
    """Return the distinct tokens behind the first ``length`` of the suffixes in a range, and how often each occurs there.

    Nothing follows the end of a document.
    """
    # Suffixes are sorted, so that equal followers are neighbours: from one to the next by doubling steps, then by halves.
    token, count = np.empty(high - low, np.int64), np.empty(high - low, np.int64)
    found = 0
    while low < high and text[array[low] + length] < len(starts) - 2:  # the separator is the largest symbol, and comes last
        one, step, last = text[array[low] + length], 1, low
        while last + step < high and text[array[last + step] + length] == one:
            last += step
            step *= 2
        end = min(last + step, high)
        while last + 1 < end:
            middle = (last + end) // 2
            if text[array[middle] + length] == one:
                last = middle
            else:
                end = middle
        token[found], count[found] = one, end - low
        found += 1
        low = end
    return token[:found], count[:found]


@numba_jit()
def followers_of_contexts(text, array, starts, history, orders):  # type: ignore[no-untyped-def]
    """Return the distinct tokens that follow the last tokens of a history in a text, for each of some rising numbers of them.

    Three rows: the number of the order, the token, and how often it follows.
    """
    ranges = np.zeros((len(orders), 2), np.int64)
    for q in range(len(orders)):
        length = orders[q]
        if length > len(history):
            break
        ranges[q] = suffix_range(text, array, starts, history, len(history) - length, length)
        if ranges[q, 0] == ranges[q, 1]:  # a longer context occurs nowhere either
            break
    found, first = np.empty((3, (ranges[:, 1] - ranges[:, 0]).sum()), np.int64), 0
    for q in range(len(orders)):
        token, count = followers(text, array, starts, ranges[q, 0], ranges[q, 1], orders[q])
        last = first + len(token)
        found[0, first:last], found[1, first:last], found[2, first:last] = q, token, count
        first = last
    return found[:, :first]


@numba_jit()
def counts_in_text(text, array, starts, history, first, target, orders, of_target, total):  # type: ignore[no-untyped-def]
    """Write to total[q, i] how often the ``orders[q]`` tokens before history[first + i] occur in the text.

    Occurrences at the end of a document, which its separator follows, do not count. of_target[q, i] is how often target[i]
    follows them.
    """
    separator = np.full(1, len(starts) - 2)
    for i in range(len(target)):
        position = first + i
        for q in range(len(orders)):
            length = orders[q]
            if length > position:
                break
            low, high = suffix_range(text, array, starts, history, position - length, length)
            if low == high:
                break
            of_target[q, i] = count_followed_by(text, array, low, high, length, target, i)
            total[q, i] = high - low
            if text[array[high - 1] + length] == separator[0]:  # the largest symbol: it comes last in the range
                total[q, i] -= count_followed_by(text, array, low, high, length, separator, 0)


@numba_jit()
def mix_hash(hashed, token):  # type: ignore[no-untyped-def]
    """Return a hash extended by a token."""
    hashed = (hashed ^ (np.uint64(token) + ONE_U64)) * FACTOR
    return hashed ^ (hashed >> HALF_WIDTH)


@numba_jit()
def find_slot(keys, key):  # type: ignore[no-untyped-def]
    """Return the slot of a key, or the free slot for it; the number of slots is a power of two."""
    last = np.uint64(len(keys) - 1)
    slot = key & last
    while keys[slot] != 0 and keys[slot] != key:
        slot = (slot + ONE_U64) & last
    return slot


@numba_jit()
def counts_in_document(keys, counts, history, first, target, orders, of_target, total, added):  # type: ignore[no-untyped-def]
    """Write to total[q, i] how often the ``orders[q]`` tokens before history[first + i] occurred earlier in the history.

    of_target[q, i] is how often target[i] followed them; then history[first + i] is counted itself.
    The slots whose counts went up are written to ``added``, so that this can be undone; return their number.
    """
    done = 0
    for i in range(len(target)):
        position = first + i
        for q in range(len(orders)):
            length = orders[q]
            if length > position:
                break
            hashed = START + np.uint64(length)
            for j in range(position - length, position):
                hashed = mix_hash(hashed, history[j])
            context = hashed | ONE_U64
            total[q, i] = counts[find_slot(keys, context)]
            of_target[q, i] = counts[find_slot(keys, mix_hash(hashed ^ NEXT, target[i]) | ONE_U64)]
            for key in (context, mix_hash(hashed ^ NEXT, history[position]) | ONE_U64):
                slot = find_slot(keys, key)
                keys[slot] = key
                counts[slot] += 1
                added[done] = slot
                done += 1
    return done


@numba_jit()
def rehash(keys, counts, new_keys, new_counts):  # type: ignore[no-untyped-def]
    """Copy a table into a larger one; return the number of taken slots."""
    taken = 0
    for slot in range(len(keys)):
        if counts[slot]:
            new = find_slot(new_keys, keys[slot])
            new_keys[new], new_counts[new] = keys[slot], counts[slot]
            taken += 1
    return taken


@numba_jit()
def longest_context(text, array, starts, history, least, most):  # type: ignore[no-untyped-def]
    """Return the length of the longest of a history's last ``least`` to ``most`` tokens that occurs in a text, or 0.

    And the range of the suffixes that it begins. Occurrences at the end of a document, which nothing follows, do not count.
    """
    found, low, high, most = 0, 0, 0, min(most, len(history))
    while least <= most:  # a context occurs wherever a longer one does
        length = (least + most + 1) // 2
        first, last = suffix_range(text, array, starts, history, len(history) - length, length)
        # The separator is the largest symbol, so that an occurrence that something follows comes first.
        if first < last and text[array[first] + length] < len(starts) - 2:
            found, low, high, least = length, first, last, length + 1
        else:
            most = length - 1
    return found, low, high


@numba_jit()
def longest_earlier(text, history, least, most, nearest):  # type: ignore[no-untyped-def]
    """Return the longest of a history's last ``least`` to ``most`` tokens that a token of ``text`` follows, and that token.

    Its length comes first (0 where there is none), then the number of the token, then the share of the places of that context
    which have this token. Of several places it is the first from number ``nearest`` on, or else the last.
    """
    length, place = 0, -1
    for i in range(least, len(text)):
        j = 0
        while j < most and j < i and j < len(history) and text[i - 1 - j] == history[len(history) - 1 - j]:
            j += 1
        if j >= least and (j > length or (j == length and place < nearest)):
            length, place = j, i
    same = places = 0
    for i in range(length, len(text) if length else 0):
        j = 0
        while j < length and text[i - 1 - j] == history[len(history) - 1 - j]:
            j += 1
        if j == length:
            places += 1
            same += text[i] == text[place]
    return length, place, same / max(places, 1)
