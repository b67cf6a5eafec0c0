"""Trainings in the process of the test, which may be killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from trime.plan import language_model
from trime.plan.language_model import Plan, train_in
from trime.tasks.language_model import LanguageModel


def load_weights(config: DictConfig) -> dict[str, torch.Tensor]:
    return load_file(Plan(config).model.path() / "model.safetensors")


def train(config: DictConfig) -> dict[str, torch.Tensor]:
    plan = Plan(config)
    for stage in ("prepare", "pack", "fit"):
        for artefact in plan.made_by(stage):
            artefact.make()
    return load_weights(config)


@contextmanager
def crash_before(update: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make training within the context fail before an update."""
    step = LanguageModel.training_step

    def fails(self: LanguageModel, *args: object) -> torch.Tensor:
        if self.global_step == update:
            raise RuntimeError("the machine went down")
        return step(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises((RuntimeError, ChildFailedError), match="went down"):
        patch.setattr(LanguageModel, "training_step", fails)
        patch.setattr(language_model, "train_in", partial(train_until, update))
        yield


@record
def train_until(update: int, *arguments: Any) -> None:
    """Train as one of several processes, and fail before an update."""
    with crash_before(update, pytest.MonkeyPatch()):
        train_in(*arguments)
    raise RuntimeError("the machine went down")
