"""What is trained: network, batches, Lightning module and callbacks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytorch_lightning as pl
from omegaconf import DictConfig

from trime.common.identity import Free
from trime.common.io import plain
from trime.common.parts import build
from trime.data.corpus import Corpus
from trime.data.module import TextDataModule
from trime.data.segments import parse_token_count
from trime.errors import UserError
from trime.models.network import Network, build_network
from trime.stages.model_io import ModelSettings, write_description
from trime.training.callbacks.checkpoints import BestWeights
from trime.training.language_model import LanguageModel, UpdateSettings


@dataclass(frozen=True)
class LanguageModelTraining:
    """Training on segments of ``length`` tokens, and the settings of its batches and updates."""

    batching: dict[str, Any]  # conf/batching
    memory: dict[str, Any]  # conf/memory
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    seed: int
    padded: bool  # padded positions are memories, too, as in the published code
    plain_updates: int  # the first ones train the plain language model (TRIME 5.2)
    model: Free[ModelSettings]
    validate_tokens: Free[int | None]  # of a validation; None: all
    length: int
    bounded: bool  # segments end with their document

    @classmethod
    def of(cls, config: DictConfig, **further: Any) -> Self:
        """Return the training that a configuration describes; ``further`` are fields of a subclass."""
        train, names = config.train, ("batching", "memory", "optimizer", "schedule", "seed")
        return cls(
            **{name: plain(config[name]) for name in names},
            padded=config.compatibility.padding is not None,
            plain_updates=math.ceil(train.plain_share * train.updates),
            model=ModelSettings.of(config),
            validate_tokens=parse_token_count(train.validate_tokens),
            length=config.segments.length,
            bounded=config.segments.bounded,
            **further,
        )

    def network(self, corpus: Corpus) -> Network:
        """Return a new network for the corpus's vocabulary."""
        return build_network(self.model.parts(), len(corpus.vocabulary))

    def describe(self, folder: Path, corpus: Corpus, trained: dict[str, Any]) -> None:
        """Write ``model.json``, from which the network is built again."""
        write_description(folder, self.model.parts(), corpus.vocabulary, trained)

    def data(self, corpus: Corpus, neighbours: np.ndarray | None, is_stateful: bool) -> TextDataModule:
        """Return the training batches in planned order, and the batches of a validation.

        ``neighbours`` [segments k] are those of training segments, if the batching needs them; a stateful model reads rows that
        continue from batch to batch.
        """
        batching = build(self.batching)
        if is_stateful and not batching.contiguous_rows:
            raise UserError("this backbone's rows continue from batch to batch: set batching=streams")
        cutting = self.length, self.bounded, self.validate_tokens
        return TextDataModule(None, corpus.folder, batching, *cutting, neighbours)

    def module(self, network: Network) -> LanguageModel:
        """Return the Lightning module that trains the network."""
        return LanguageModel(network, *self.module_parts())

    def module_parts(self) -> tuple[Any, UpdateSettings, Any, Any]:
        """Return what a Lightning module needs beside its network: memory in training, settings, optimiser and schedule."""
        training = UpdateSettings(self.seed, self.plain_updates, self.padded)
        memory = build(self.memory) if self.memory.get("_target_") else None
        optimizer = build(self.optimizer, _partial_=True)
        return memory, training, optimizer, build(self.schedule)

    def callbacks(self, corpus: Corpus) -> list[pl.Callback]:
        """Return the callbacks that this task adds."""
        return []

    def best_weights(self, folder: Path) -> BestWeights:
        """Return the callback that keeps the weights of the best validation, the one with the lowest objective."""
        return BestWeights(folder)
