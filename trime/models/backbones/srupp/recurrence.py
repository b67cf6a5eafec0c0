"""SRU's elementwise recurrence: step by step as the paper has it, and the kernels that compute the same.

For every lane of every row, with the gates' weights v and biases b (Lei et al. 2018, Eq. 1 to 4):

    f_t = sigmoid(u1_t + v1 c_{t-1} + b1)         c_t = f_t c_{t-1} + (1 - f_t) u0_t
    r_t = sigmoid(u2_t + v2 c_{t-1} + b2)         h_t = x_t + r_t mask (c_t - x_t)

f_t depends on c_{t-1}, so no associative scan solves it. It needs 5 numbers a lane and step from memory and some 30
operations: a kernel that keeps c in registers is bound by memory, and that is what ``kernel_cpu`` (numba) and ``kernel_cuda``
(Triton) are.
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
    """h and c of all steps. ``u`` holds u0, u1, u2 one behind the other (e = 3d); ``start`` is c before the first step.

    ``mask`` is the dropout of the highway, one for all steps. In float32 (half precision is read as that), no
    gradient reaches ``start``, nor u through c: a state is carried on without gradient.
    """
    if u.dtype == torch.float64 or u.device.type not in ("cpu", "cuda"):
        return by_steps(u, x, weight, bias, mask, start)
    every = (part.float().contiguous() for part in (u, x, weight, bias, mask, start))
    h, c = Recurrence.apply(*every)
    return h.to(x.dtype), c


def by_steps(
    u: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, start: Tensor
) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b l d"]]:
    """The same from the equations; what the kernels are tested against."""
    candidate, forget, highway = u.chunk(3, -1)
    c, cells = start, []
    for step in range(u.shape[1]):
        f = (forget[:, step] + weight[0] * c + bias[0]).sigmoid()
        c = f * c + (1 - f) * candidate[:, step]
        cells.append(c)
    after = torch.stack(cells, 1)
    before = torch.cat([start[:, None], after[:, :-1]], 1)
    r = (highway + weight[1] * before + bias[1]).sigmoid()
    return x + r * mask[:, None] * (after - x), after


class Recurrence(torch.autograd.Function):
    """The kernels of the device that the tensors are on."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        h, c = kernels(given[0]).forward(*given)
        ctx.save_for_backward(*given, c)
        ctx.mark_non_differentiable(c)
        return h, c

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        u, x, weight, bias, mask, start, c = ctx.saved_tensors
        du, dx, rows = kernels(u).backward(u, x, weight, bias, mask, start, c, gradient[0].contiguous())
        of_weight, of_bias = rows.sum(0).chunk(2)
        return du, dx, of_weight, of_bias, None, None


def kernels(u: Tensor) -> Any:
    """Those of a device."""
    if u.device.type == "cpu":
        return kernel_cpu
    from trime.models.backbones.srupp import kernel_cuda  # triton comes with torch for CUDA only

    return kernel_cuda
