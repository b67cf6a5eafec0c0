"""Keys as bytes: a query's cosine with each of them to within a bound, in a fourth of the memory traffic."""

from __future__ import annotations

import numpy as np

from trime.common.numba_kernels import numba_jit

LEVELS = 127


@numba_jit()
def quantize(key, row, scale, size):  # type: ignore[no-untyped-def]
    """Write keys [n d] as bytes ``row``, each with its ``scale`` [n], and ``size``, the sum of its magnitudes as bytes say."""
    for i in range(len(key)):
        largest = np.float32(1e-12)
        for j in range(key.shape[1]):
            largest = max(largest, abs(key[i, j]))
        scale[i] = largest / np.float32(LEVELS)
        total = np.int64(0)
        for j in range(key.shape[1]):
            row[i, j] = np.int8(round(key[i, j] / scale[i]))
            total += abs(np.int64(row[i, j]))
        size[i] = total * scale[i]


@numba_jit()
def bounds(row, scale, size, query, step, magnitude, low, high):  # type: ignore[no-untyped-def]
    """Write bounds [n] of the products of keys with a query: its bytes [d] of scale ``step``, its ``magnitude`` in sum."""
    whole = np.empty(len(row), np.int32)  # with these in a loop of their own, pairs of bytes are multiplied and added at once
    for i in range(len(row)):
        total = np.int32(0)
        for j in range(row.shape[1]):
            total += np.int32(row[i, j]) * np.int32(query[j])
        whole[i] = total
    for i in range(len(row)):
        product, error = whole[i] * (scale[i] * step), (magnitude * scale[i] + step * size[i]) / np.float32(2)
        low[i], high[i] = product - error, product + error
