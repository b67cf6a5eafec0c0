"""A long training says early how long it will take; one whose checkpoints the disk cannot hold does not start."""

from __future__ import annotations

import logging
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import DictConfig

from trime.common.quantities import duration
from trime.errors import UserError
from trime.lab.runner import run
from trime.stages.graph import Graph
from trime.training.callbacks import forecast
from trime.training.callbacks.forecast import MEASURED, WARM_UP

Tiny = Callable[..., DictConfig]
BEFORE = ["experiment=trime", "stages=[prepare,fit]", "dataset.modules=20"]


def test_a_long_training_is_forecast(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Measured after the plain updates and a warm-up; for the clock an update takes a minute here."""
    clock = iter(range(60, 100_000, 60 * MEASURED))
    monkeypatch.setattr(forecast, "time", SimpleNamespace(perf_counter=clock.__next__))
    plain, updates = 2, WARM_UP + MEASURED + 12
    with caplog.at_level(logging.INFO, "trime"):
        run(tiny(*BEFORE, f"train.updates={updates}", f"train.plain_share={plain / updates}", f"paths.outputs={tmp_path}"))
    remaining = updates - plain - WARM_UP - MEASURED
    assert f"{remaining} updates to go, about {remaining} minutes" in caplog.text


def test_a_short_training_is_not(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trime"):
        run(tiny(*BEFORE, f"train.updates={WARM_UP + MEASURED + 2}", f"paths.outputs={tmp_path}"))
    assert "updates to go" not in caplog.text


def test_checkpoints_must_fit_on_the_disk(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**20, 2**20, 100_000))
    config = tiny(*BEFORE, f"paths.outputs={tmp_path}")
    with pytest.raises(UserError, match=r"checkpoints need up to 1 MiB: free space"):
        run(config)
    assert not Graph(config).fit.folder.exists()


def test_durations_are_words() -> None:
    said = [duration(seconds) for seconds in (0.5, 150, 3 * 3600, 5.02 * 86400)]
    assert said == ["0.5 seconds", "2.5 minutes", "3 hours", "5.02 days"]
