"""Training by Lightning: precision, progress bar, checkpoints, and resuming from the last one."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from hydra.utils import instantiate
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Checkpoint, ProgressBar, StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.utilities.exceptions import SIGTERMException

from trime.common.identity import Free
from trime.common.io import plain
from trime.common.progress import Progress
from trime.errors import UserError
from trime.training.callbacks import BestWeights, Checkpoints
from trime.training.hardware import Hardware, training_products

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of Lightning's trainer, without its callbacks.

    ``arguments`` and ``callbacks`` were added by the user: arguments of the trainer, and callbacks by their ``_target_``. They
    may change what is trained.
    """

    updates: int
    clip_norm: float
    arguments: dict[str, Any]
    callbacks: dict[str, Any]
    hardware: Hardware
    checkpoint_every: Free[int]
    log_every: Free[int]

    @classmethod
    def of(cls, config: DictConfig) -> TrainerSettings:
        """Return the settings of a configuration."""
        train, callbacks = config.train, {name: one for name, one in plain(config.callbacks).items() if one is not None}
        added = plain(config.trainer.extra), callbacks, Hardware.of(config.trainer)
        return cls(train.updates, train.clip_norm, *added, train.checkpoint_every, train.log_every)

    def added_callbacks(self) -> list[pl.Callback]:
        """Return the callbacks that were added; UserError if an entry is not a Lightning callback."""
        callbacks = []
        for name, settings in self.callbacks.items():
            callback = instantiate(settings, _convert_="all")
            if not isinstance(callback, pl.Callback):
                raise UserError(f"callbacks.{name}: {settings['_target_']} is not a Lightning callback")
            if isinstance(callback, StochasticWeightAveraging):
                raise UserError(
                    f"callbacks.{name} sets learning rates by epochs, and a training here has none: use EMAWeightAveraging"
                )
            callbacks.append(callback)
        return callbacks

    def build(self, stage: str, folder: Path, callbacks: list[pl.Callback], arguments: dict[str, Any]) -> pl.Trainer:
        """Return Lightning's trainer with ``arguments`` and all that was added; UserError where it refuses an argument."""
        further, hardware = self.added_callbacks(), self.hardware
        if any(isinstance(each, WeightAveraging) for each in further) and any(
            isinstance(each, BestWeights) for each in callbacks
        ):
            # Lightning takes the averages back before BestWeights can read them.
            raise UserError("a callback that averages weights needs train.keep=last: the best ones are those before averaging")
        own_bar = hardware.progress_bar and not any(isinstance(one, ProgressBar) for one in further)
        saving = Checkpoints(folder / "checkpoints", self.checkpoint_every)
        # Checkpoints come last, since they save the states of the callbacks before them.
        options = {
            "max_steps": self.updates,
            "gradient_clip_val": self.clip_norm or None,
            "log_every_n_steps": self.log_every,
            "accelerator": hardware.accelerator,
            "precision": hardware.precision,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
            "enable_progress_bar": hardware.progress_bar,
            "enable_checkpointing": any(isinstance(one, Checkpoint) for one in further),
            "callbacks": [*callbacks, *further, KeepTermination(), *([TrainingProgress(stage)] if own_bar else []), saving],
            "default_root_dir": folder,
        }
        try:
            return pl.Trainer(**options | arguments | instantiate(OmegaConf.create(self.arguments), _convert_="all"))
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise UserError(f"Lightning's trainer refuses an argument: {' '.join(str(error).split())}") from error


class KeepTermination(pl.Callback):
    """Leaves SIGTERM to a handler that was there before: Lightning's would end a job that its launcher is about to requeue."""

    def __init__(self) -> None:
        self.handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if callable(self.handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.handler)


class TrainingProgress(ProgressBar):
    """One bar over all updates, across resumed runs and epochs."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage, self.shown = stage, True
        self.bar: Any = None

    def enable(self) -> None:
        self.shown = True

    def disable(self) -> None:  # Lightning calls this in all processes but the first
        self.shown = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total, done = trainer.max_steps, trainer.global_step
        self.bar = Progress(total=total, initial=done, unit="update", desc=self.stage, disable=not self.shown)

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
    """Train, resuming from the last checkpoint of a killed run; KeyboardInterrupt if it is stopped by a signal."""
    checkpoints = sorted((folder / "checkpoints").glob("update-*.ckpt"))
    if checkpoints:
        log.info(f"{stage}: resuming from {checkpoints[-1].name}")
    last = str(checkpoints[-1]) if checkpoints else None
    try:
        with training_products(trainer.strategy.root_device, trainer.precision):
            trainer.fit(task, data, ckpt_path=last, weights_only=True)
    except SystemExit as end:  # Lightning's answer to both signals; the checkpoint stays
        if isinstance(end, SIGTERMException) or isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise  # a launcher that handles signals itself, to requeue its jobs, gets its SystemExit


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Lightning's advertisements and hints, but not profiles and summaries, which are asked for."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("pytorch_lightning.profilers", "pytorch_lightning.callbacks.model_summary"):
        logging.getLogger(name).setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
