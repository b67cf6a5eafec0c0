"""Training by Lightning: precision, progress bar, checkpoints, and resuming from the last one."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.callbacks import ProgressBar
from tqdm import tqdm

from trime.tasks.callbacks.checkpoints import Checkpoints

log = logging.getLogger(__name__)


def resolved_precision(config: DictConfig) -> str:
    """Return Lightning's name of the precision; "auto" is bf16 if the device supports it."""
    if config.trainer.precision != "auto":
        return str(config.trainer.precision)
    on_cuda = torch.cuda.is_available() and config.trainer.accelerator != "cpu"
    return "bf16-mixed" if on_cuda and torch.cuda.is_bf16_supported() else "32-true"


def training_callbacks(stage: str, folder: Path, config: DictConfig) -> list[pl.Callback]:
    """Return the callbacks for the progress bar, if it is enabled, and checkpoints; they must come after all others."""
    bar = [Progress(stage)] if config.trainer.enable_progress_bar else []
    return [*bar, Checkpoints(folder / "checkpoints", config.train.checkpoint_every)]


class Progress(ProgressBar):
    """One bar over all updates, across resumed runs and epochs."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage, self.shown = stage, True
        self.bar: Any = None

    def enable(self) -> None:
        """Show the bar."""
        self.shown = True

    def disable(self) -> None:
        """Hide the bar; Lightning calls this in all processes but the first."""
        self.shown = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total, done = trainer.max_steps, trainer.global_step
        self.bar = tqdm(total=total, initial=done, unit="update", desc=self.stage, mininterval=1, disable=not self.shown)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        made = trainer.global_step - self.bar.n
        if made and self.bar.update(made):  # True if the bar was redrawn
            self.bar.set_postfix(trainer.progress_bar_metrics)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.bar.set_description(f"{self.stage}, validating")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.bar.set_description(self.stage)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.bar.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self.bar is not None:
            self.bar.close()


def run_training(stage: str, trainer: pl.Trainer, task: pl.LightningModule, data: Any, folder: Path) -> None:
    """Train, resuming from the last checkpoint of a killed run."""
    try:
        trainer.fit(task, data, ckpt_path=latest_checkpoint(stage, folder / "checkpoints"), weights_only=True)
    except SystemExit:  # raised by Lightning on an interrupt; the checkpoint stays
        raise KeyboardInterrupt from None


def latest_checkpoint(stage: str, folder: Path) -> str | None:
    """Return the path of the last checkpoint that a killed run left, if there is one."""
    checkpoints = sorted(folder.glob("update-*.ckpt"))
    if checkpoints:
        log.info(f"{stage}: resuming from {checkpoints[-1].name}")
    return str(checkpoints[-1]) if checkpoints else None


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Lightning's advertisements and hints."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
