"""SRU's recurrence on a CUDA device, in Triton: each program keeps some lanes of one row, and walks through the steps.

Measured nowhere yet: tested on the CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import triton
import triton.language as tl

from trime.types import Tensor

LANES = 128  # of a program


def forward(u: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """h and c, [b l d]."""
    h, c = torch.empty_like(x), torch.empty_like(x)
    b, steps, d = x.shape
    _forward[(b, triton.cdiv(d, LANES))](u, x, weight, bias, mask, start, h, c, steps, d, LANES)
    return h, c


def backward(
    u: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, start: Tensor, c: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of u and x, and row by row those of weight (2) and bias (2): [b 4 d]."""
    b, steps, d = x.shape
    du, dx, rows = torch.empty_like(u), torch.empty_like(x), u.new_empty(b, 4, d)
    _backward[(b, triton.cdiv(d, LANES))](u, x, weight, bias, mask, start, c, dh, du, dx, rows, steps, d, LANES)
    return du, dx, rows


def compiled(function: Any) -> Any:
    """What Triton makes of a function as it is written, whatever an import hook has put around it."""
    return triton.jit(inspect.unwrap(function))


@compiled
def gates(u, at, lane, inside, before, vf, vr, bf, br, d):  # type: ignore[no-untyped-def]
    """f and r of a step whose numbers begin at ``at``."""
    u1 = tl.load(u + at * 3 + d + lane, inside, 0.0)
    u2 = tl.load(u + at * 3 + 2 * d + lane, inside, 0.0)
    return tl.sigmoid(u1 + vf * before + bf), tl.sigmoid(u2 + vr * before + br)


@compiled
def _forward(u, x, weight, bias, mask, start, h, c, steps, d, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * lanes + tl.arange(0, lanes)
    inside = lane < d
    vf, vr = tl.load(weight + lane, inside, 0.0), tl.load(weight + d + lane, inside, 0.0)
    bf, br = tl.load(bias + lane, inside, 0.0), tl.load(bias + d + lane, inside, 0.0)
    kept, cell = tl.load(mask + row * d + lane, inside, 0.0), tl.load(start + row * d + lane, inside, 0.0)
    for t in range(steps):
        at = (row * steps + t) * d
        f, r = gates(u, at, lane, inside, cell, vf, vr, bf, br, d)
        u0, own = tl.load(u + at * 3 + lane, inside, 0.0), tl.load(x + at + lane, inside, 0.0)
        cell = u0 + (cell - u0) * f
        tl.store(c + at + lane, cell, inside)
        tl.store(h + at + lane, own + r * kept * (cell - own), inside)


@compiled
def _backward(u, x, weight, bias, mask, start, c, dh, du, dx, rows, steps, d, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * lanes + tl.arange(0, lanes)
    inside = lane < d
    vf, vr = tl.load(weight + lane, inside, 0.0), tl.load(weight + d + lane, inside, 0.0)
    bf, br = tl.load(bias + lane, inside, 0.0), tl.load(bias + d + lane, inside, 0.0)
    kept, first = tl.load(mask + row * d + lane, inside, 0.0), tl.load(start + row * d + lane, inside, 0.0)
    carried, dvf, dvr, dbf, dbr = kept * 0, kept * 0, kept * 0, kept * 0, kept * 0
    for back in range(steps):
        t = steps - 1 - back
        at = (row * steps + t) * d
        later = lane * 0 + t > 0
        before = tl.where(later, tl.load(c + at - d + lane, inside & later, 0.0), first)
        f, r = gates(u, at, lane, inside, before, vf, vr, bf, br, d)
        u0, own = tl.load(u + at * 3 + lane, inside, 0.0), tl.load(x + at + lane, inside, 0.0)
        after, out = tl.load(c + at + lane, inside, 0.0), tl.load(dh + at + lane, inside, 0.0)
        through = out * kept
        dc = carried + through * r
        of_r = through * (after - own) * r * (1 - r)
        of_f = dc * (before - u0) * f * (1 - f)
        tl.store(dx + at + lane, out - through * r, inside)
        tl.store(du + at * 3 + lane, dc * (1 - f), inside)
        tl.store(du + at * 3 + d + lane, of_f, inside)
        tl.store(du + at * 3 + 2 * d + lane, of_r, inside)
        dvf, dvr, dbf, dbr = dvf + of_f * before, dvr + of_r * before, dbf + of_f, dbr + of_r
        carried = dc * f + of_f * vf + of_r * vr
    tl.store(rows + row * 4 * d + lane, dvf, inside)
    tl.store(rows + (row * 4 + 1) * d + lane, dvr, inside)
    tl.store(rows + (row * 4 + 2) * d + lane, dbf, inside)
    tl.store(rows + (row * 4 + 3) * d + lane, dbr, inside)
