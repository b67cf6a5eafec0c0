"""Adam as in fairseq: decoupled decay comes first, and epsilon is added to the second moment before its correction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trime.optim.base import PerParameter


class Adam(PerParameter):
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

    def update_parameter(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "first": torch.zeros_like(parameter), "second": torch.zeros_like(parameter)}
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["first"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step_size = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["first"], state["second"].sqrt().add_(group["eps"]), value=-step_size)
