"""Loops over numbers, compiled by numba so that they become vector instructions: how kernels on the CPU are made and run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import njit
from numpy.polynomial import Chebyshev, Polynomial

from trime.types import Tensor

LOG2_E = np.float32(np.log2(np.e))
ONE, HALF = np.float32(1), np.float32(0.5)
# 2^r for r in [-1/2, 1/2], to 2e-9
P0, P1, P2, P3, P4, P5, P6 = (
    np.float32(c) for c in Chebyshev.interpolate(np.exp2, 6, [-0.5, 0.5]).convert(kind=Polynomial).coef
)
LEAST = np.float32(-87.0)  # e to that is the least normal number of float32


def compiled(parallel: bool = False, reorder: bool = False) -> Callable[[Any], Any]:
    """What numba makes of a function as it is written, whatever an import hook has put around it.

    ``reorder`` lets sums be taken in another order, which vector instructions need.
    """
    fast = {"reassoc", "contract", "nsz"} if reorder else False
    return lambda function: njit(inspect.unwrap(function), parallel=parallel, fastmath=fast, cache=True)


def on_threads(kernel: Any, *given: Any) -> Any:
    """Runs a kernel on as many threads as PyTorch has; tensors are given as arrays over the same memory."""
    most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(torch.get_num_threads(), most))
    return kernel(*(part.detach().numpy() if isinstance(part, Tensor) else part for part in given))


@compiled()
def exponentials(x, scale, top, out, bits, power):  # type: ignore[no-untyped-def]
    """out = e^(scale x - top), where that is not below e^-87. ``power`` is the memory of ``bits`` read as float32.

    An exponent that is shifted to its place is a power of two; the rest is a polynomial.
    """
    for j in range(len(x)):
        scaled = max(x[j] * scale - top, LEAST) * LOG2_E
        whole = np.floor(scaled + HALF)
        r = scaled - whole
        out[j] = P0 + r * (P1 + r * (P2 + r * (P3 + r * (P4 + r * (P5 + r * P6)))))
        bits[j] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    for j in range(len(x)):
        out[j] *= power[j]
