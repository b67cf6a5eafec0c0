"""SRU's recurrence on a CUDA device, in Triton: each program takes some lanes of one row through all steps.

Its speed is not measured yet. It is also tested on the CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trime.common.triton_kernels import triton_jit
from trime.common.types import Tensor

LANES = 128  # per program


def forward(u: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return h and c, [b l d]."""
    h, c = torch.empty_like(x), torch.empty_like(x)
    b, steps, d = x.shape
    _forward[(b, triton.cdiv(d, LANES))](u, x, weight, bias, mask, start, h, c, steps, d, LANES)
    return h, c


def backward(
    u: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, start: Tensor, c: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of u and x, and, row by row, those of the weights (2) and biases (2): [b 4 d]."""
    b, steps, d = x.shape
    du, dx, rows = torch.empty_like(u), torch.empty_like(x), u.new_empty(b, 4, d)
    _backward[(b, triton.cdiv(d, LANES))](u, x, weight, bias, mask, start, c, dh, du, dx, rows, steps, d, LANES)
    return du, dx, rows


@triton_jit
def gates(u, at, lane, inside, c_prev, vf, vr, bf, br, d):  # type: ignore[no-untyped-def]
    """Return f and r of the step whose values begin at ``at``."""
    u1 = tl.load(u + at * 3 + d + lane, inside, 0.0)
    u2 = tl.load(u + at * 3 + 2 * d + lane, inside, 0.0)
    return tl.sigmoid(u1 + vf * c_prev + bf), tl.sigmoid(u2 + vr * c_prev + br)


@triton_jit
def _forward(u, x, weight, bias, mask, start, h, c, steps, d, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * lanes + tl.arange(0, lanes)
    inside = lane < d
    vf, vr = tl.load(weight + lane, inside, 0.0), tl.load(weight + d + lane, inside, 0.0)
    bf, br = tl.load(bias + lane, inside, 0.0), tl.load(bias + d + lane, inside, 0.0)
    dropout, cell = tl.load(mask + row * d + lane, inside, 0.0), tl.load(start + row * d + lane, inside, 0.0)
    for t in range(steps):
        at = (row * steps + t) * d
        f, r = gates(u, at, lane, inside, cell, vf, vr, bf, br, d)
        u0, x_t = tl.load(u + at * 3 + lane, inside, 0.0), tl.load(x + at + lane, inside, 0.0)
        cell = u0 + (cell - u0) * f
        tl.store(c + at + lane, cell, inside)
        tl.store(h + at + lane, x_t + r * dropout * (cell - x_t), inside)


@triton_jit
def _backward(u, x, weight, bias, mask, start, c, dh, du, dx, rows, steps, d, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * lanes + tl.arange(0, lanes)
    inside = lane < d
    vf, vr = tl.load(weight + lane, inside, 0.0), tl.load(weight + d + lane, inside, 0.0)
    bf, br = tl.load(bias + lane, inside, 0.0), tl.load(bias + d + lane, inside, 0.0)
    dropout, first = tl.load(mask + row * d + lane, inside, 0.0), tl.load(start + row * d + lane, inside, 0.0)
    dc_next, dvf, dvr, dbf, dbr = dropout * 0, dropout * 0, dropout * 0, dropout * 0, dropout * 0
    for step in range(steps):
        t = steps - 1 - step
        at = (row * steps + t) * d
        has_previous = lane * 0 + t > 0
        c_prev = tl.where(has_previous, tl.load(c + at - d + lane, inside & has_previous, 0.0), first)
        f, r = gates(u, at, lane, inside, c_prev, vf, vr, bf, br, d)
        u0, x_t = tl.load(u + at * 3 + lane, inside, 0.0), tl.load(x + at + lane, inside, 0.0)
        c_t, dh_t = tl.load(c + at + lane, inside, 0.0), tl.load(dh + at + lane, inside, 0.0)
        dropped = dh_t * dropout
        dc = dc_next + dropped * r
        dr = dropped * (c_t - x_t) * r * (1 - r)  # before the sigmoid, as df
        df = dc * (c_prev - u0) * f * (1 - f)
        tl.store(dx + at + lane, dh_t - dropped * r, inside)
        tl.store(du + at * 3 + lane, dc * (1 - f), inside)
        tl.store(du + at * 3 + d + lane, df, inside)
        tl.store(du + at * 3 + 2 * d + lane, dr, inside)
        dvf, dvr, dbf, dbr = dvf + df * c_prev, dvr + dr * c_prev, dbf + df, dbr + dr
        dc_next = dc * f + df * vf + dr * vr
    tl.store(rows + row * 4 * d + lane, dvf, inside)
    tl.store(rows + (row * 4 + 1) * d + lane, dvr, inside)
    tl.store(rows + (row * 4 + 2) * d + lane, dbf, inside)
    tl.store(rows + (row * 4 + 3) * d + lane, dbr, inside)
