"""Learning rates by update number, counted from 0 (TRIME Table 9; fairseq's schedulers)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch.optim.lr_scheduler import LambdaLR

from trime.errors import UserError


class Cosine:
    """Linear warm-up from ``initial`` to ``peak``, then cosine periods from ``peak`` down to ``floor``.

    Each period is ``stretch`` times as long as the one before, and its peak and floor are ``shrink`` times as high.
    With ``period`` None there is one period, which ends at the last update.
    """

    def __init__(
        self,
        peak: float,
        updates: int,
        floor: float = 0.0,
        warmup: int = 0,
        initial: float = 0.0,
        period: int | None = None,
        stretch: float = 1.0,
        shrink: float = 0.1,
    ):
        self.peak, self.floor, self.warmup, self.initial = peak, floor, warmup, initial
        self.period, self.stretch, self.shrink = period or max(1, updates - warmup), stretch, shrink

    def __call__(self, update: int) -> float:
        if update < self.warmup:
            return self.initial + (self.peak - self.initial) * update / self.warmup
        past = update - self.warmup
        if self.stretch == 1:
            number, done, length = past // self.period, float(past % self.period), float(self.period)
        else:  # period n begins after a geometric sum of the lengths before it
            number = math.floor(math.log(1 - past / self.period * (1 - self.stretch), self.stretch))
            done = past - (1 - self.stretch**number) / (1 - self.stretch) * self.period
            length = self.period * self.stretch**number
        scale = self.shrink**number
        return scale * (self.floor + (self.peak - self.floor) / 2 * (1 + math.cos(math.pi * done / length)))


class InverseSquareRoot:
    """Linear warm-up from ``initial`` to ``peak``, then peak sqrt(warmup / update); ValueError without warm-up."""

    def __init__(self, peak: float, warmup: int, initial: float = 0.0):
        if warmup < 1:
            raise ValueError(f"schedule.warmup={warmup}: the inverse square root needs at least one update of warm-up")
        self.peak, self.warmup, self.initial = peak, warmup, initial

    def __call__(self, update: int) -> float:
        if update < self.warmup:
            return self.initial + (self.peak - self.initial) * update / self.warmup
        return self.peak * math.sqrt(self.warmup / update)


def with_schedule(optimizer: torch.optim.Optimizer, schedule: Callable[[int], float]) -> OptimizerLRSchedulerConfig:
    """Return the optimiser with a scheduler that gives all its groups the learning rate ``schedule(update)``."""
    for group in optimizer.param_groups:
        # LambdaLR multiplies this by its factor: with 1 the factor is the learning rate to the last bit.
        group["initial_lr"] = 1.0
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, schedule), "interval": "step"}}


def check_scheduler_state(checkpoint: dict[str, Any]) -> None:
    """Raise UserError at a checkpoint of a training without scheduler: it would start at the first learning rate again."""
    if checkpoint.get("lr_schedulers") == []:  # absent from checkpoints that hold only weights
        raise UserError(
            "the checkpoint to resume from was saved by an older version, without its learning rate: "
            "delete the folder checkpoints/ that holds it, and train anew"
        )
