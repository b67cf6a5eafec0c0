"""Adam as in fairseq: decoupled decay comes first, and epsilon is added to the second moment before its correction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trime.optim.base import GroupOptimizer


class Adam(GroupOptimizer):
    """The update p <- (1 - lr wd) p - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps): torch's AdamW corrects v
    before it adds eps."""

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
        beta1, beta2 = group["betas"]
        first, second = ([state[name] for state in states] for name in ("first", "second"))
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, gradients, alpha=1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
        steps = [state["step"] for state in states]  # of parameters that had a gradient
        sizes = [-group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step) for step in steps]
        divisors = torch._foreach_sqrt(second)
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, first, divisors, sizes)
