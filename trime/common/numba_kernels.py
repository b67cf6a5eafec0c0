"""Compiling and running numba kernels, and the vectorised exponential, sums and maxima that they share."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from numba import njit
from numpy.polynomial import Chebyshev, Polynomial

from trime.common.types import Tensor

log = logging.getLogger(__name__)

LANES = 32  # partial sums, which vector instructions add to at once
STEP = 4 * LANES  # terms that are added to the partial sums at once
LOG2_E = np.float32(np.log2(np.e))
ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)
# 2^r for r in [-1/2, 1/2], to 2e-9
P0, P1, P2, P3, P4, P5, P6 = (
    np.float32(c) for c in Chebyshev.interpolate(np.exp2, 6, [-0.5, 0.5]).convert(kind=Polynomial).coef
)
HIDDEN = np.float32(-np.inf)  # the score of an entry that is not seen
MIN_EXPONENT = np.float32(-87.0)  # e^-87 is close to the smallest normal float32


class ParallelKernel:
    """A function compiled in two ways: for one thread, which starts no others, and for several."""

    def __init__(self, function: FunctionType):
        code, closure = function.__code__, function.__closure__
        alone = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
        alone.__qualname__ += ".alone"  # numba's cache tells the two apart by this name
        alone.__module__ = function.__module__
        self.alone, self.shared = compiled(alone), compiled(function, parallel=True)


def numba_jit(parallel: bool = False) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function by numba, without the wrapper of an import hook (shape checks in tests).

    Arithmetic is strict (no fastmath): where the compiler may reorder a sum, it does so differently in code that it has just
    compiled and in code from its cache, and the first run after installation would differ from later ones.
    """
    make = ParallelKernel if parallel else compiled
    return lambda function: make(inspect.unwrap(function))


def compiled(function: FunctionType, parallel: bool = False) -> Any:
    """Return a function that numba compiles when it is first called, and keeps on disk where a folder can be written."""
    try:
        return njit(function, parallel=parallel, cache=True)
    except RuntimeError:  # neither the package's folder nor one of the user's can be written
        warn_of_no_cache()
        return njit(function, parallel=parallel)


@cache
def warn_of_no_cache() -> None:
    log.warning("compiled kernels cannot be kept, so that each process compiles them again: set NUMBA_CACHE_DIR to a folder")


def run_kernel(kernel: ParallelKernel, *arguments: Any) -> Any:
    """Run a kernel on as many threads as PyTorch uses; tensors are passed as arrays that share their memory.

    The numbers of threads of PyTorch and numba stay as they were: when numba starts its threads, OpenMP, which PyTorch
    shares, is set to all cores.
    """
    arrays = [part.detach().numpy() if isinstance(part, Tensor) else part for part in arguments]
    threads = torch.get_num_threads()
    if threads == 1:
        return kernel.alone(*arrays)
    before = numba.get_num_threads()  # starts numba's threads
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    try:
        return kernel.shared(*arrays)
    finally:
        numba.set_num_threads(before)


@numba_jit()
def exponentials(x, scale, top, out, bits, power):  # type: ignore[no-untyped-def]
    """Write max(e^(scale x - top), e^-87) to ``out``; ``power`` is a float32 view of the buffer ``bits``.

    The integer part of the exponent is shifted into the bits of a float; a polynomial computes the rest.
    """
    for j in range(len(x)):
        scaled = max(x[j] * scale - top, MIN_EXPONENT) * LOG2_E
        integer = np.floor(scaled + HALF)
        r = scaled - integer
        out[j] = P0 + r * (P1 + r * (P2 + r * (P3 + r * (P4 + r * (P5 + r * P6)))))
        bits[j] = (np.int32(integer) + np.int32(127)) << np.int32(23)
    for j in range(len(x)):
        out[j] *= power[j]


@numba_jit()
def lane_sum(x, lanes):  # type: ignore[no-untyped-def]
    """Return the float32 sum of ``x``; ``lanes`` is a buffer of LANES partial sums.

    Its order is written out, so that strict arithmetic can use vector instructions, with the same result on every processor.
    """
    lanes[:] = ZERO
    whole = len(x) // STEP * STEP
    for first in range(0, whole, STEP):
        part = x[first : first + STEP]
        for i in range(LANES):
            lanes[i] += (part[i] + part[i + LANES]) + (part[i + 2 * LANES] + part[i + 3 * LANES])
    for first in range(whole, len(x), LANES):
        for i in range(min(LANES, len(x) - first)):
            lanes[i] += x[first + i]
    return add_lanes(lanes)


@numba_jit()
def add_lanes(lanes):  # type: ignore[no-untyped-def]
    """Return the sum of partial sums."""
    total = ZERO
    for i in range(LANES // 4):
        total += (lanes[i] + lanes[i + LANES // 4]) + (lanes[i + LANES // 2] + lanes[i + 3 * LANES // 4])
    return total


@numba_jit()
def largest(x, lanes):  # type: ignore[no-untyped-def]
    """Return the largest number of ``x``, -inf if it is empty; ``lanes`` is a buffer of LANES partial maxima."""
    lanes[:] = HIDDEN
    whole = len(x) // STEP * STEP
    for first in range(0, whole, STEP):
        part = x[first : first + STEP]
        for i in range(LANES):
            lanes[i] = max(max(lanes[i], part[i]), max(max(part[i + LANES], part[i + 2 * LANES]), part[i + 3 * LANES]))
    for j in range(whole, len(x)):
        lanes[0] = max(lanes[0], x[j])
    return lanes.max()
