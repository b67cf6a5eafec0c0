"""SRU's elementwise recurrence: step by step as in the paper, and with kernels that compute the same.

For every lane of every row, with the gates' weights v and biases b (Lei et al. 2018, Eq. 1 to 4):

    f_t = sigmoid(u1_t + v1 c_{t-1} + b1)         c_t = f_t c_{t-1} + (1 - f_t) u0_t
    r_t = sigmoid(u2_t + v2 c_{t-1} + b2)         h_t = x_t + r_t mask (c_t - x_t)

f_t depends on c_{t-1}, so no associative scan solves it. A step of a lane loads 5 numbers from memory and takes some 30
operations: a kernel that keeps c in registers is memory-bound, as ``kernel_cpu`` (numba) and ``kernel_cuda`` (Triton) are.
"""

from __future__ import annotations

from typing import Any

import torch

from trime.models.backbones.srupp import kernel_cpu
from trime.types import Float, Tensor


def recurrence(
    u: Float[Tensor, "b l e"],
    x: Float[Tensor, "b l d"],
    weight: Float[Tensor, "2 d"],
    bias: Float[Tensor, "2 d"],
    mask: Float[Tensor, "b d"],
    start: Float[Tensor, "b d"],
) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b l d"]]:
    """Return h and c of all steps; ``u`` is u0, u1 and u2 concatenated (e = 3d), ``start`` is c before the first step.

    ``mask`` is the dropout mask of the highway, the same at all steps. In float32 (half precision is converted to it) no
    gradient flows into ``start``, nor into u through the returned c: states are kept without gradient.
    """
    if u.dtype == torch.float64 or u.device.type not in ("cpu", "cuda"):
        return by_steps(u, x, weight, bias, mask, start)
    inputs = (part.float().contiguous() for part in (u, x, weight, bias, mask, start))
    h, c = Recurrence.apply(*inputs)
    return h.to(x.dtype), c


def by_steps(
    u: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, start: Tensor
) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b l d"]]:
    """Return h and c step by step, from the equations; the kernels are tested against this."""
    candidate, forget, highway = u.chunk(3, -1)
    c, cells = start, []
    for step in range(u.shape[1]):
        f = (forget[:, step] + weight[0] * c + bias[0]).sigmoid()
        c = f * c + (1 - f) * candidate[:, step]
        cells.append(c)
    states = torch.stack(cells, 1)
    previous = torch.cat([start[:, None], states[:, :-1]], 1)
    r = (highway + weight[1] * previous + bias[1]).sigmoid()
    return x + r * mask[:, None] * (states - x), states


class Recurrence(torch.autograd.Function):
    """The recurrence by the kernels of the device that the tensors are on."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        h, c = kernels(inputs[0]).forward(*inputs)
        ctx.save_for_backward(*inputs, c)
        ctx.mark_non_differentiable(c)
        return h, c

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        u, x, weight, bias, mask, start, c = ctx.saved_tensors
        du, dx, rows = kernels(u).backward(u, x, weight, bias, mask, start, c, gradient[0].contiguous())
        dweight, dbias = rows.sum(0).chunk(2)
        return du, dx, dweight, dbias, None, None


def kernels(u: Tensor) -> Any:
    """Return the module of kernels for a tensor's device."""
    if u.device.type == "cpu":
        return kernel_cpu
    from trime.models.backbones.srupp import kernel_cuda  # triton is installed with torch for CUDA only

    return kernel_cuda
