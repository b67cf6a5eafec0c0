"""What a kind of task brings to its training: network, batches, Lightning module and callbacks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.data.corpus import Corpus
from trime.data.module import TextDataModule
from trime.errors import UserError
from trime.lab.settings import Configured
from trime.models.network import Network, build_network
from trime.stages.model_io import model_of, write_description
from trime.training.callbacks.checkpoints import BestWeights
from trime.training.language_model import LanguageModel, UpdateSettings


class TrainingTask(Configured, ABC):
    """The parts of a training that depend on what is trained."""

    @abstractmethod
    def network(self, corpus: Corpus) -> Network:
        """Return a new network for the corpus's vocabulary."""

    @abstractmethod
    def describe(self, folder: Path, corpus: Corpus, trained: dict[str, Any]) -> None:
        """Write ``model.json``, from which the network is built again."""

    @abstractmethod
    def data(self, corpus: Corpus, neighbours: np.ndarray | None, is_stateful: bool) -> TextDataModule:
        """Return the training batches in planned order, and the batches of a validation.

        ``neighbours`` [segments k] are those of training segments, if the batching needs them; a stateful model reads rows that
        continue from batch to batch.
        """

    @abstractmethod
    def module(self, network: Network) -> LanguageModel:
        """Return the Lightning module that trains the network."""

    def callbacks(self, corpus: Corpus) -> list[pl.Callback]:
        """Return the callbacks that this task adds."""
        return []

    def best_weights(self, folder: Path) -> BestWeights:
        """Return the callback that keeps the weights of the best validation, the one with the lowest objective."""
        return BestWeights(folder)


class LanguageModelTraining(TrainingTask):
    """Training on segments of text."""

    depends_on = (*("segments", "batching"), *("seed", "memory", "optimizer", "schedule", "compatibility.padding"))
    unhashed = ("model", "train")  # the fit's own settings have them

    def network(self, corpus: Corpus) -> Network:
        return build_network(self.config.model, len(corpus.vocabulary))

    def describe(self, folder: Path, corpus: Corpus, trained: dict[str, Any]) -> None:
        write_description(folder, model_of(self.config), corpus.vocabulary, trained)

    def data(self, corpus: Corpus, neighbours: np.ndarray | None, is_stateful: bool) -> TextDataModule:
        segments, batching = self.config.segments, instantiate(self.config.batching, _convert_="all")
        if is_stateful and not batching.contiguous_rows:
            raise UserError("this backbone's rows continue from batch to batch: set batching=streams")
        cutting = (segments.length, segments.bounded, self.config.train.validate_tokens)
        return TextDataModule(None, corpus.folder, batching, *cutting, neighbours)

    def module(self, network: Network) -> LanguageModel:
        return LanguageModel(network, *training_parts(self.config))


def training_parts(config: DictConfig) -> tuple[Any, UpdateSettings, Any, Any]:
    """Return what a Lightning module needs beside its network: memory in training, settings, optimiser and schedule."""
    train = config.train
    padded = config.compatibility.padding is not None
    training = UpdateSettings(config.seed, math.ceil(train.plain_share * train.updates), padded)
    memory = instantiate(config.memory, _convert_="all") if config.memory.get("_target_") else None
    optimizer = instantiate(config.optimizer, _partial_=True, _convert_="all")
    return memory, training, optimizer, instantiate(config.schedule, _convert_="all")
