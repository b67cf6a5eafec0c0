"""Callbacks that save checkpoints to resume from, and the weights of the best validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from safetensors.torch import load_file
from torch import Tensor

from trime.common.io import write_tensors
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
