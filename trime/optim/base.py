"""The base class of the published optimisers: they update the parameters of a group together, in few kernels on CUDA."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class GroupOptimizer(torch.optim.Optimizer):
    """An optimiser whose update of a parameter depends on that parameter, its state and its group alone."""

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
            self.finish_group(group)
        return loss

    @abstractmethod
    def update(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update parameters of a group in place."""

    def finish_group(self, group: dict[str, Any]) -> None:
        """Store in a group what its next update needs."""
