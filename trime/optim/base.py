"""The base class of the published optimisers: they update one parameter after the other, group by group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class PerParameter(torch.optim.Optimizer):
    """An optimiser whose update of a parameter depends on that parameter, its state and its group alone."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update_parameter(parameter, parameter.grad, group)
            self.finish_group(group)
        return loss

    @abstractmethod
    def update_parameter(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a parameter in place."""

    def finish_group(self, group: dict[str, Any]) -> None:
        """Store in a group what its next update needs."""
