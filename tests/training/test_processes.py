"""How a training ends by a signal: as an interrupt of the command, or as its launcher wants it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import SIGTERMException

from trime.training.trainer import KeepTermination, run_training


def train(end: Callable[[], Any], folder: Path) -> None:
    """Run a training that ends in this way."""
    trainer = Mock(spec=pl.Trainer, precision="32-true", fit=lambda *_, **__: end())
    trainer.strategy.root_device = torch.device("cpu")
    run_training("fit", trainer, Mock(spec=pl.LightningModule), None, folder)


def test_a_signal_is_an_interrupt(tmp_path: Path) -> None:
    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise SystemExit(1)  # noqa: B904  # as Lightning does

    def terminated() -> None:
        raise SIGTERMException

    for end in (interrupted, terminated):
        with pytest.raises(KeyboardInterrupt):
            train(end, tmp_path)


def test_a_launcher_may_end_its_job(tmp_path: Path) -> None:
    def requeued() -> None:
        raise SystemExit(144)

    with pytest.raises(SystemExit) as end:
        train(requeued, tmp_path)
    assert end.value.code == 144


def test_a_launchers_handler_stays() -> None:
    def handler(*_: Any) -> None:
        pass

    before = signal.signal(signal.SIGTERM, handler)
    try:
        keep = KeepTermination()
        signal.signal(signal.SIGTERM, lambda *_: None)  # as Lightning does
        keep.on_train_start(Mock(spec=pl.Trainer), Mock(spec=pl.LightningModule))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
