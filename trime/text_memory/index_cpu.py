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
def products(row, query, out):  # type: ignore[no-untyped-def]
    """Write the products [n] of bytes [n d] with those of a query [d], in whole numbers."""
    for i in range(len(row)):
        total = np.int32(0)
        for j in range(row.shape[1]):
            total += np.int32(row[i, j]) * np.int32(query[j])
        out[i] = total
