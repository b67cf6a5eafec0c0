"""Adam as fairseq has it: decoupled decay first, epsilon added to the second moment before its correction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


class Adam(torch.optim.Optimizer):
    """p <- (1 - lr wd) p - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps): torch's AdamW corrects v before eps is added."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                self.move(parameter, group)
        return loss

    def move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state |= {"step": 0, "first": torch.zeros_like(parameter), "second": torch.zeros_like(parameter)}
        state["step"] += 1
        one, two = group["betas"]
        state["first"].mul_(one).add_(gradient, alpha=1 - one)
        state["second"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        size = group["lr"] * math.sqrt(1 - two ** state["step"]) / (1 - one ** state["step"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["first"], state["second"].sqrt().add_(group["eps"]), value=-size)
