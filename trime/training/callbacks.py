"""Lightning callbacks of the lab: checkpoints and best weights, metrics.csv, and how long training will take."""

from __future__ import annotations

import csv
import logging
import math
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from safetensors.torch import load_file
from torch import Tensor

from trime.common.choices import duration
from trime.common.io import check_room, write_tensors
from trime.common.metrics import processor_seconds
from trime.errors import UserError
from trime.models.network import without_aliases


class Checkpoints(pl.Callback):
    """Save a checkpoint every ``every`` updates and keep the last. List it last: it saves the state of those before it."""

    def __init__(self, folder: Path, every: int):
        self.folder, self.every = folder, every

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A due validation comes first, so that a resumed run neither loses nor repeats it.
        every = trainer.val_check_batch
        validates_now = trainer.enable_validation and every and batches_done(trainer) % every == 0
        if ends_update(trainer, batch_idx) and not validates_now:
            self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.save(trainer)

    def save(self, trainer: pl.Trainer) -> None:
        """Write a checkpoint under a temporary name and rename it when it is complete, then remove the older ones."""
        if trainer.global_step % self.every:
            return
        file = self.folder / f"update-{trainer.global_step:09d}.ckpt"
        partial = file.with_suffix(".partial")
        trainer.save_checkpoint(partial)
        if trainer.is_global_zero:
            partial.replace(file)
            for older in self.folder.glob("update-*.ckpt"):
                if older != file:
                    older.unlink()
        trainer.strategy.barrier()


class BestWeights(pl.Callback):
    """Keep the weights of the best validation by ``monitor`` (the lowest, or ``highest``), the last update's included."""

    def __init__(self, folder: Path, monitor: str = "valid/objective", highest: bool = False):
        self.folder, self.monitor, self.sign = folder, monitor, -1.0 if highest else 1.0
        self.score, self.update = float("inf"), 0

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score, "update": self.update}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.score, self.update = state_dict["score"], state_dict["update"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if ends_update(trainer, batch_idx) and trainer.global_step == trainer.max_steps:
            trainer.val_check_batch = batches_done(trainer)  # Lightning validates now, whatever the interval

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        score = self.sign * float(trainer.callback_metrics[self.monitor])
        # Of equal ones the first counts.
        if score >= self.score or trainer.global_step == 0:
            return
        previous, self.score, self.update = self.update, score, trainer.global_step
        weights = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            trained = {name: weight for name, weight in weights.items() if name not in pl_module.frozen}  # type: ignore[operator]
            write_tensors(self.file_of(self.update), without_aliases(trained))
            for older in self.folder.glob("best-*.safetensors"):
                # The previous file stays: a run resumed from an older checkpoint needs it.
                if older not in (self.file_of(self.update), self.file_of(previous)):
                    older.unlink()

    def file_of(self, update: int) -> Path:
        return self.folder / f"best-{update:09d}.safetensors"

    def weights(self) -> dict[str, Tensor]:
        """Return the best weights by their names in the network."""
        return {name.removeprefix("network."): weight for name, weight in load_file(self.file_of(self.update)).items()}


def ends_update(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return True where a micro-batch was the last of its update, or of an epoch, which ends an update too."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or batch_idx + 1 == trainer.num_training_batches


def batches_done(trainer: pl.Trainer) -> int:
    """Return the number of micro-batches that Lightning counts validations by: of the epoch, or of all epochs."""
    loop = trainer.fit_loop.epoch_loop
    return 1 + (loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx)


log = logging.getLogger(__name__)

WARM_UP, MEASURED = 3, 10  # updates
COPIES = 7  # of the weights, at most on disk at once: the model, the best weights, and two checkpoints with Adam's two moments
WORTH_SAYING = 120.0  # seconds: shorter trainings need no forecast


class Forecast(pl.Callback):
    """After a few updates, logs the time of those that remain; validations are counted in, as far as there were any.

    With ``plain_updates`` at the start, which are shorter than the others, it measures after these.
    """

    clock = staticmethod(time.perf_counter)

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
            self.first, self.started = step, self.clock()
        elif step >= self.first + MEASURED:
            seconds = (self.clock() - self.started) / (step - self.first)
            remaining = int(trainer.max_steps) - step
            if trainer.is_global_zero and seconds * remaining > WORTH_SAYING:
                log.info(f"{self.stage}: {remaining:,} updates to go, about {duration(seconds * remaining)}")
            self.first = None


TRAIN = ["train/loss", "train/perplexity", "train/memory_share", "train/lr"]
COLUMNS = ["update", *TRAIN, "tokens_per_second", "valid/objective", "valid/objective_perplexity"]


class History(pl.Callback):
    """Appends a row every ``every`` updates and after each validation; tokens and seconds are counted across resumed runs."""

    def __init__(self, path: Path, every: int):
        self.path, self.every = path, every
        self.tokens, self.seconds, self.update = 0, 0.0, 0
        self.processor_seconds: float | None = 0.0
        self.marked_tokens, self.written = 0, -1
        self.clock = self.marked = time.perf_counter()
        self.processor_clock = processor_seconds()
        self.columns = COLUMNS

    def state_dict(self) -> dict[str, Any]:
        self.tick()
        return {"tokens": self.tokens, "seconds": self.seconds, "processor_seconds": self.processor_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens, self.seconds = state_dict["tokens"], state_dict["seconds"]
        self.processor_seconds = state_dict.get("processor_seconds")  # checkpoints of earlier versions have none
        self.marked_tokens = self.tokens

    def tick(self) -> None:
        """Add the time since the last call to ``seconds`` and ``processor_seconds``."""
        now, processor_now = time.perf_counter(), processor_seconds()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        if self.processor_seconds is not None:
            self.processor_seconds += processor_now - self.processor_clock
        self.processor_clock = processor_now

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop the rows of updates that a resumed run repeats; add the columns of the backbone's metrics."""
        self.columns = [*COLUMNS, *(f"train/{name}" for name in pl_module.network.training_metrics())]  # type: ignore[union-attr, operator]
        self.clock = self.marked = time.perf_counter()
        self.processor_clock = processor_seconds()
        self.update = trainer.global_step
        if not trainer.is_global_zero:
            return
        rows = []
        # A killed run may have written rows after its last checkpoint: the resumed one writes them again.
        if self.path.exists():
            with open(self.path, newline="") as file:
                rows = [row for row in csv.DictReader(file) if int(row["update"]) <= trainer.global_step]
        with open(self.path, "w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step != self.update:
            self.update = trainer.global_step
            self.tokens += int(trainer.lightning_module.update_targets)  # type: ignore[arg-type]
        if trainer.global_step % self.every == 0 and trainer.global_step != self.written:
            now = time.perf_counter()
            speed = (self.tokens - self.marked_tokens) / max(now - self.marked, 1e-9)
            self.marked, self.marked_tokens, self.written = now, self.tokens, trainer.global_step
            self.append(trainer, {"tokens_per_second": round(speed, 1)}, "train/")
            for logger in trainer.loggers:
                logger.log_metrics({"tokens_per_second": speed}, trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.append(trainer, {}, "valid/")

    def append(self, trainer: pl.Trainer, row: dict[str, Any], prefix: str) -> None:
        """Append a row with the logged metrics of a prefix."""
        if not trainer.is_global_zero:
            return
        metrics = {name: round(float(value), 6) for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise UserError(f"{name} is {value} after update {trainer.global_step}: lower schedule.peak")
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore")
            writer.writerow({"update": trainer.global_step, **metrics, **row})
