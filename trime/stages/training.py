"""How Lightning trains here: checkpoints, going on from the last one, and quietly."""

from __future__ import annotations

import logging
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.callbacks import ModelCheckpoint, TQDMProgressBar


def resolved_precision(config: DictConfig) -> str:
    """Lightning's name of the precision; "auto" is bf16 where the device in use has it."""
    if config.trainer.precision != "auto":
        return str(config.trainer.precision)
    on_cuda = torch.cuda.is_available() and config.trainer.accelerator != "cpu"
    return "bf16-mixed" if on_cuda and torch.cuda.is_bf16_supported() else "32-true"


def watched_training(folder: Path, config: DictConfig) -> list[pl.Callback]:
    """A checkpoint every so often, the last one kept; a progress bar, if it is wanted."""
    checkpoints = ModelCheckpoint(
        folder / "checkpoints",
        "update-{step:09d}",
        every_n_train_steps=config.train.checkpoint_every,
        save_top_k=1,
        monitor="step",
        mode="max",
        auto_insert_metric_name=False,
    )
    return [checkpoints, *([TQDMProgressBar(refresh_rate=20)] if config.trainer.enable_progress_bar else [])]


def run_training(trainer: pl.Trainer, task: pl.LightningModule, data: Any, folder: Path) -> None:
    """Trains, going on from the last checkpoint of a killed run."""
    try:
        trainer.fit(task, data, ckpt_path=newest(folder / "checkpoints"), weights_only=True)
    except SystemExit:  # Lightning's answer to an interrupt; the checkpoint stays
        raise KeyboardInterrupt from None


def newest(folder: Path) -> str | None:
    """The last checkpoint of a killed run."""
    whole = [path for path in folder.glob("*.ckpt") if zipfile.is_zipfile(path)]  # a kill may leave a truncated one
    found = sorted(whole, key=lambda path: path.stat().st_mtime)
    if found:
        print(f"fit goes on from {found[-1].name}")
    return str(found[-1]) if found else None


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Lightning's adverts and hints out of the log."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
