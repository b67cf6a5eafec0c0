"""What the published optimisers share: an update is made parameter by parameter, group by group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class PerParameter(torch.optim.Optimizer):
    """An optimiser whose update of a parameter looks at nothing but that parameter, its state and its group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)
            self.after(group)
        return loss

    @abstractmethod
    def move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Updates a parameter in place."""

    def after(self, group: dict[str, Any]) -> None:
        """What a group remembers of the update."""
