"""Nesterov's accelerated gradient as in fairseq: the momentum buffer is rescaled when the learning rate changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trime.optim.base import GroupOptimizer


class NAG(GroupOptimizer):
    """The update p <- (1 - lr wd) p + m^2 c b - (1 + m) lr grad;  b <- m c b - lr grad;  c = lr / previous lr."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.99, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "previous": lr, "momentum": momentum, "weight_decay": weight_decay})

    def update(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        ratio = lr / group["previous"] if group["previous"] else 1.0
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["buffer"] for parameter in parameters]
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, buffers, alpha=momentum**2 * ratio)
        torch._foreach_add_(parameters, gradients, alpha=-(1 + momentum) * lr)
        torch._foreach_mul_(buffers, momentum * ratio)
        torch._foreach_add_(buffers, gradients, alpha=-lr)

    def finish_group(self, group: dict[str, Any]) -> None:
        group["previous"] = group["lr"]
