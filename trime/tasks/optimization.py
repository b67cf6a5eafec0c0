"""Optimiser and learning rates of a task, as Lightning's ``configure_optimizers`` returns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch.optim.lr_scheduler import LambdaLR

from trime.errors import UserError


def with_schedule(optimizer: torch.optim.Optimizer, schedule: Callable[[int], float]) -> OptimizerLRSchedulerConfig:
    """Return the optimiser with a scheduler that gives all its groups the learning rate ``schedule(update)``.

    LambdaLR multiplies a group's ``initial_lr`` by its factor. With 1 there, the factor is the learning rate to the last bit.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = 1.0
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, schedule), "interval": "step"}}


def check_scheduler_state(checkpoint: dict[str, Any]) -> None:
    """Raise UserError at a checkpoint of a training without scheduler: it would start at the first learning rate again."""
    if checkpoint.get("lr_schedulers") == []:  # absent from checkpoints of weights alone
        raise UserError(
            "the checkpoint to resume from was saved by an older version, without its learning rate: "
            "delete the folder checkpoints/ that holds it, and train anew"
        )
