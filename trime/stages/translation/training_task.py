"""Training on sentence pairs (TRIME section 5.4, Appendix C)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
from hydra.utils import instantiate
from omegaconf import OmegaConf

from trime.common.io import plain
from trime.data.corpus import Corpus
from trime.data.parallel.corpus import PairDataModule, ParallelCorpus
from trime.models.network import Network, build_network
from trime.stages.model_io import model_of, write_description
from trime.stages.training_task import TrainingTask, training_parts
from trime.stages.translation.bleu_validation import BleuValidation
from trime.stages.translation.translate import ALONE
from trime.training.callbacks.checkpoints import BestWeights
from trime.training.language_model import TranslationModule
from trime.training.processes import DEVICE


class TranslationTraining(TrainingTask):
    """Training on sentence pairs; the best validation may be the one with the highest BLEU."""

    depends_on = (
        *("batching", "seed", "memory", "optimizer", "schedule", "compatibility.padding"),
        *("translation.smoothing", "translation.joined_dictionary"),
    )
    unhashed = ("model", "train", "translation", "evaluate.scaled_interpolation", *DEVICE)

    def settings(self) -> Any:
        translation = plain(self.config.translation)
        return super().settings() | ({"best_by": {name: translation[name] for name in ALONE}} if self.by_bleu else {})

    @property
    def by_bleu(self) -> bool:
        """Whether the best validation is the one with the highest BLEU."""
        return self.config.train.keep == "best" and self.config.translation.best_by == "bleu"

    def callbacks(self, corpus: Corpus) -> list[pl.Callback]:
        assert isinstance(corpus, ParallelCorpus)
        return [BleuValidation(corpus, self.config)] if self.by_bleu else []

    def best_weights(self, folder: Path) -> BestWeights:
        return BestWeights(folder, "valid/bleu", highest=True) if self.by_bleu else super().best_weights(folder)

    def network(self, corpus: Corpus) -> Network:
        return build_network(OmegaConf.create(self.model(corpus)), len(corpus.vocabulary))

    def model(self, corpus: Corpus) -> dict[str, Any]:
        """Return the description of the model, with a table for the source language if it has its own dictionary."""
        assert isinstance(corpus, ParallelCorpus)
        model = model_of(self.config)
        if not self.config.translation.joined_dictionary:
            model["backbone"]["source_vocabulary"] = len(corpus.sources.vocabulary)
        return model

    def describe(self, folder: Path, corpus: Corpus, trained: dict[str, Any]) -> None:
        assert isinstance(corpus, ParallelCorpus)
        write_description(folder, self.model(corpus), corpus.vocabulary, trained, source=corpus.sources.vocabulary)

    def data(self, corpus: Corpus, neighbours: np.ndarray | None, is_stateful: bool) -> PairDataModule:
        batching, tokens = instantiate(self.config.batching, _convert_="all"), self.config.train.validate_tokens
        return PairDataModule(None, corpus.folder, batching, validate_tokens=tokens, neighbours=neighbours)

    def module(self, network: Network) -> TranslationModule:
        return TranslationModule(network, *training_parts(self.config), smoothing=self.config.translation.smoothing)
