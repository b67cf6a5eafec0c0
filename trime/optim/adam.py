"""Adam as fairseq has it: decoupled decay first, epsilon added to the second moment before its correction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trime.optim.base import PerParameter


class Adam(PerParameter):
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

    def move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "first": torch.zeros_like(parameter), "second": torch.zeros_like(parameter)}
        state["step"] += 1
        one, two = group["betas"]
        state["first"].mul_(one).add_(gradient, alpha=1 - one)
        state["second"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        size = group["lr"] * math.sqrt(1 - two ** state["step"]) / (1 - one ** state["step"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["first"], state["second"].sqrt().add_(group["eps"]), value=-size)
