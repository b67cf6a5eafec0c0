"""A callback that says early how long a training will take, and stops one whose checkpoints the disk cannot hold."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytorch_lightning as pl

from trime.common.io import check_room
from trime.common.quantities import duration

log = logging.getLogger(__name__)

WARM_UP, MEASURED = 3, 10  # updates
COPIES = 7  # of the weights, at most on disk at once: the model, the best weights, and two checkpoints with Adam's two moments
WORTH_SAYING = 120.0  # seconds: shorter trainings need no forecast


class Forecast(pl.Callback):
    """After a few updates, logs the time of those that remain; validations are counted in, as far as there were any.

    With ``plain_updates`` at the start, which are shorter than the others, it measures after these.
    """

    def __init__(self, stage: str, folder: Path, plain_updates: int = 0):
        self.stage, self.folder, self.plain_updates = stage, folder, plain_updates
        self.first: int | None = None
        self.started = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise UserError if the disk is too small for the checkpoints."""
        trained = [weight for weight in pl_module.parameters() if weight.requires_grad]
        needed = COPIES * sum(weight.numel() * weight.element_size() for weight in trained)
        if trainer.is_global_zero:
            check_room(self.folder, needed, "checkpoints")
        self.first = max(trainer.global_step, self.plain_updates) + WARM_UP

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Measure MEASURED updates after the warm-up, then log the time of the remaining ones, once."""
        step = trainer.global_step
        if self.first is None or step < self.first:
            return
        if not self.started:
            self.first, self.started = step, time.perf_counter()
        elif step >= self.first + MEASURED:
            seconds = (time.perf_counter() - self.started) / (step - self.first)
            remaining = int(trainer.max_steps) - step
            if trainer.is_global_zero and seconds * remaining > WORTH_SAYING:
                log.info(f"{self.stage}: {remaining:,} updates to go, about {duration(seconds * remaining)}")
            self.first = None
