"""SRU's recurrence on the CPU, compiled by numba: each job takes some lanes of one row through all steps.

Loops over lanes contain only arithmetic, so that they are vectorized: even the exponential is a polynomial and a shift.
Measured at 16 x 512 x 1,920 on 2 cores: 4 times faster than PyTorch step by step, and memory-bound.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from trime.common.numba_kernels import ONE, ZERO, exponentials, numba_jit, run_kernel
from trime.common.types import Tensor

LANES = 128  # per job
LIMIT = np.float32(80.0)  # beyond it a sigmoid is 0 or 1 in float32


def forward(u: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return h and c, [b l d] in float32."""
    h, c = torch.empty_like(x), torch.empty_like(x)
    run_kernel(
        _forward, u, x, weight.clone(), bias.clone(), mask, start, h, c
    )  # clones: FSDP cannot free memory that NumPy has seen
    return h, c


def backward(
    u: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, start: Tensor, c: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of u and x, and, row by row, those of the weights (2) and biases (2): [b 4 d]."""
    du, dx, rows = torch.empty_like(u), torch.empty_like(x), u.new_zeros(len(u), 4, x.shape[2])
    run_kernel(_backward, u, x, weight.clone(), bias.clone(), mask, start, c, dh, du, dx, rows)
    return du, dx, rows


@numba_jit()
def sigmoids(z, bits, power):  # type: ignore[no-untyped-def]
    """Compute sigmoids in place; ``power`` is a float32 view of the buffer ``bits``."""
    for j in range(len(z)):
        z[j] = max(z[j], -LIMIT)
    exponentials(z, -ONE, ZERO, z, bits, power)
    for j in range(len(z)):
        z[j] = ONE / (ONE + z[j])


@numba_jit(parallel=True)
def _forward(u, x, weight, bias, mask, start, h, c):  # type: ignore[no-untyped-def]
    b, steps, d = x.shape
    blocks = (d + LANES - 1) // LANES
    for job in prange(b * blocks):
        row, low = job // blocks, job % blocks * LANES
        high = min(low + LANES, d)
        n = high - low
        cell, dropout = start[row, low:high].copy(), mask[row, low:high]
        vf, vr, bf, br = weight[0, low:high], weight[1, low:high], bias[0, low:high], bias[1, low:high]
        f, r, bits = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.int32)
        power = bits.view(np.float32)
        for t in range(steps):
            u0, u1, u2 = u[row, t, low:high], u[row, t, d + low : d + high], u[row, t, 2 * d + low : 2 * d + high]
            x_t, h_t, c_t = x[row, t, low:high], h[row, t, low:high], c[row, t, low:high]
            for j in range(n):
                f[j] = u1[j] + vf[j] * cell[j] + bf[j]
                r[j] = u2[j] + vr[j] * cell[j] + br[j]
            sigmoids(f, bits, power)
            sigmoids(r, bits, power)
            for j in range(n):
                new = u0[j] + (cell[j] - u0[j]) * f[j]
                cell[j] = new
                c_t[j] = new
                h_t[j] = x_t[j] + r[j] * dropout[j] * (new - x_t[j])


@numba_jit(parallel=True)
def _backward(u, x, weight, bias, mask, start, c, dh, du, dx, rows):  # type: ignore[no-untyped-def]
    b, steps, d = x.shape
    blocks = (d + LANES - 1) // LANES
    for job in prange(b * blocks):
        row, low = job // blocks, job % blocks * LANES
        high = min(low + LANES, d)
        n = high - low
        first, dropout = start[row, low:high], mask[row, low:high]
        vf, vr, bf, br = weight[0, low:high], weight[1, low:high], bias[0, low:high], bias[1, low:high]
        dvf, dvr, dbf, dbr = rows[row, 0, low:high], rows[row, 1, low:high], rows[row, 2, low:high], rows[row, 3, low:high]
        f, r, bits = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.int32)
        power, dc_next = bits.view(np.float32), np.zeros(n, np.float32)
        for step in range(steps):
            t = steps - 1 - step
            u0, u1, u2 = u[row, t, low:high], u[row, t, d + low : d + high], u[row, t, 2 * d + low : 2 * d + high]
            du0, du1, du2 = du[row, t, low:high], du[row, t, d + low : d + high], du[row, t, 2 * d + low : 2 * d + high]
            x_t, dx_t, dh_t, c_t = x[row, t, low:high], dx[row, t, low:high], dh[row, t, low:high], c[row, t, low:high]
            c_prev = c[row, t - 1, low:high] if t > 0 else first
            for j in range(n):
                f[j] = u1[j] + vf[j] * c_prev[j] + bf[j]
                r[j] = u2[j] + vr[j] * c_prev[j] + br[j]
            sigmoids(f, bits, power)
            sigmoids(r, bits, power)
            for j in range(n):
                dropped = dh_t[j] * dropout[j]
                dc = dc_next[j] + dropped * r[j]
                dx_t[j] = dh_t[j] - dropped * r[j]
                dr = dropped * (c_t[j] - x_t[j]) * r[j] * (ONE - r[j])  # before the sigmoid, as df
                df = dc * (c_prev[j] - u0[j]) * f[j] * (ONE - f[j])
                du0[j], du1[j], du2[j] = dc * (ONE - f[j]), df, dr
                dvf[j] += df * c_prev[j]
                dvr[j] += dr * c_prev[j]
                dbf[j] += df
                dbr[j] += dr
                dc_next[j] = dc * f[j] + df * vf[j] + dr * vr[j]
