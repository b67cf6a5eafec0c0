"""A callback that writes metrics.csv, with tokens per second, consistently over interruptions."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from trime.common.metrics import processor_seconds
from trime.errors import UserError

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
        """Drop the rows of updates that a resumed run repeats; add a column for each of the backbone's metrics."""
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
