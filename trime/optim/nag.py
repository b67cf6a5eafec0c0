"""Nesterov's accelerated gradient as in fairseq: the momentum buffer is rescaled when the learning rate changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trime.optim.base import PerParameter


class NAG(PerParameter):
    """The update p <- (1 - lr wd) p + m^2 c b - (1 + m) lr grad;  b <- m c b - lr grad;  c = lr / previous lr."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.99, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "previous": lr, "momentum": momentum, "weight_decay": weight_decay})

    def update_parameter(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        lr, momentum, state = group["lr"], group["momentum"], self.state[parameter]
        if not state:
            state["buffer"] = torch.zeros_like(parameter)
        buffer, ratio = state["buffer"], lr / group["previous"] if group["previous"] else 1.0
        parameter.mul_(1 - lr * group["weight_decay"]).add_(buffer, alpha=momentum**2 * ratio)
        parameter.add_(gradient, alpha=-(1 + momentum) * lr)
        buffer.mul_(momentum * ratio).add_(gradient, alpha=-lr)

    def finish_group(self, group: dict[str, Any]) -> None:
        group["previous"] = group["lr"]
