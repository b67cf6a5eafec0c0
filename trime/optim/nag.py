"""Nesterov's accelerated gradient as fairseq has it: the momentum follows the learning rate's changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class NAG(torch.optim.Optimizer):
    """p <- (1 - lr wd) p + m^2 c b - (1 + m) lr grad;  b <- m c b - lr grad;  c = lr / previous lr."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.99, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "previous": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            ratio = lr / group["previous"] if group["previous"] else 1.0
            for parameter in (p for p in group["params"] if p.grad is not None):
                self.move(parameter, lr, momentum, ratio, group["weight_decay"])
            group["previous"] = lr
        return loss

    def move(self, parameter: torch.Tensor, lr: float, momentum: float, ratio: float, decay: float) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        buffer = state["buffer"] if "buffer" in state else state.setdefault("buffer", torch.zeros_like(parameter))
        parameter.mul_(1 - lr * decay).add_(buffer, alpha=momentum**2 * ratio)
        parameter.add_(parameter.grad, alpha=-(1 + momentum) * lr)
        buffer.mul_(momentum * ratio).add_(parameter.grad, alpha=-lr)
