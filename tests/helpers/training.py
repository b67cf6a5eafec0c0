"""Trainings in the process of the test, which may be killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from trime.stages import graph as plan_module
from trime.stages.graph import Graph, train_in
from trime.training import language_model as tasks_module
from trime.training.language_model import LanguageModel


def load_weights(config: DictConfig) -> dict[str, torch.Tensor]:
    return load_file(Graph(config).model.path() / "model.safetensors")


def train(config: DictConfig) -> dict[str, torch.Tensor]:
    graph = Graph(config)
    for stage in ("prepare", "pack", "fit"):
        for artefact in graph.artefacts_of(stage):
            artefact.make()
    return load_weights(config)


CRASH, SHARDED = "TRIME_TEST_CRASH", "TRIME_TEST_SHARDED"  # an update; a file to which sharded trainings add a line


@contextmanager
def crash_before(update: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make training within the context fail before an update, in this process or in those that it launches."""
    with monkeypatch.context() as patch, pytest.raises((RuntimeError, ChildFailedError), match="went down"):
        fail_before(update, patch)
        patch.setenv(CRASH, str(update))
        patch.setattr(plan_module, "train_in", train_watched)
        yield


def fail_before(update: int, patch: pytest.MonkeyPatch) -> None:
    """Make training in this process fail before an update."""
    step = LanguageModel.training_step

    def fails(self: LanguageModel, *args: object) -> torch.Tensor:
        if self.global_step == update:
            raise RuntimeError("the machine went down")
        return step(self, *args)  # type: ignore[arg-type]

    patch.setattr(LanguageModel, "training_step", fails)


@record
def train_watched(*arguments: Any) -> None:
    """Train as one of several processes: it fails where ``CRASH`` says, and notes in ``SHARDED`` that weights are sharded."""
    patch, shard = pytest.MonkeyPatch(), tasks_module.shard_weights
    if CRASH in os.environ:
        fail_before(int(os.environ[CRASH]), patch)
    if SHARDED in os.environ:

        def noted(network: Any, mesh: Any) -> None:
            with open(os.environ[SHARDED], "a") as file:
                file.write(f"{os.environ['RANK']}\n")
            shard(network, mesh)

        patch.setattr(tasks_module, "shard_weights", noted)
    train_in(*arguments)
