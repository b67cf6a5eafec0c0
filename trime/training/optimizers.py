"""Adam and Nesterov's accelerated gradient as in fairseq, which differ from torch's."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


class GroupOptimizer(torch.optim.Optimizer):
    """An optimiser whose update of a parameter depends only on that parameter, its state and its group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self.update(parameters, [parameter.grad for parameter in parameters], group)
        return loss

    @abstractmethod
    def update(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update parameters of a group in place."""


class Adam(GroupOptimizer):
    """The update p <- (1 - lr wd) p - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps).

    torch's AdamW corrects v before it adds eps.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def update(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state |= {"step": 0, "first": torch.zeros_like(parameter), "second": torch.zeros_like(parameter)}
            state["step"] += 1
        first, second = ([state[name] for state in states] for name in ("first", "second"))
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, gradients, alpha=1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
        steps = [state["step"] for state in states]  # they differ: a parameter without a gradient is not updated
        sizes = [-group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step) for step in steps]
        divisors = torch._foreach_sqrt(second)
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, first, divisors, sizes)


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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:  # also of groups without a gradient, whose learning rate changes too
            group["previous"] = group["lr"]
        return loss
