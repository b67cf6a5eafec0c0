"""Training on sentence pairs (TRIME section 5.4, Appendix C)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from trime.common.components import build
from trime.common.types import Batch, Tensor
from trime.data.corpus import Corpus
from trime.models.network import Network
from trime.scoring.mixture_spec import MixtureSpec
from trime.stages.fit import LanguageModelTraining
from trime.stages.model_io import write_description
from trime.training.callbacks import BestWeights
from trime.training.language_model import LanguageModel
from trime.translation.beam import SearchSettings, Translator
from trime.translation.pairs.corpus import PairDataModule, ParallelCorpus
from trime.translation.translate import score_translations


@dataclass(frozen=True)
class TranslationTraining(LanguageModelTraining):
    """Training on whole sentence pairs; the best validation may be the one with the highest BLEU."""

    smoothing: float
    joined_dictionary: bool
    best_by: SearchSettings | None  # of the translations whose BLEU chooses the weights; None: the objective chooses

    def callbacks(self, corpus: Corpus) -> list[pl.Callback]:
        assert isinstance(corpus, ParallelCorpus)
        return [BleuValidation(corpus, self.best_by)] if self.best_by else []

    def best_weights(self, folder: Path) -> BestWeights:
        return BestWeights(folder, "valid/bleu", highest=True) if self.best_by else super().best_weights(folder)

    def components(self, corpus: Corpus) -> dict[str, Any]:
        """Return the description of the model, with a table for the source language if it has its own dictionary."""
        assert isinstance(corpus, ParallelCorpus)
        model = super().components(corpus)
        if not self.joined_dictionary:
            model["backbone"]["source_vocabulary"] = len(corpus.sources.vocabulary)
        return model

    def describe(self, folder: Path, corpus: Corpus, trained: dict[str, Any]) -> None:
        assert isinstance(corpus, ParallelCorpus)
        write_description(folder, self.components(corpus), corpus.vocabulary, trained, source=corpus.sources.vocabulary)

    def data(self, corpus: Corpus, neighbours: np.ndarray | None, is_stateful: bool) -> PairDataModule:
        batching = build(self.batching, "batching")
        return PairDataModule(None, corpus.folder, batching, validate_tokens=self.validate_tokens, neighbours=neighbours)

    def module(self, network: Network) -> TranslationModule:
        return TranslationModule(network, *self.module_arguments(), smoothing=self.smoothing)


class BleuValidation(pl.Callback):
    """Logs ``valid/bleu``: BLEU of the translations of valid by the model without memories, with this run's beam search."""

    def __init__(self, corpus: ParallelCorpus, settings: SearchSettings):
        self.corpus, self.settings = corpus, settings

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        alone = MixtureSpec((), ())
        translator = Translator(pl_module.network, alone, None, self.corpus, self.settings)  # type: ignore[arg-type]
        references = self.corpus.references("valid")[: self.settings.sentences]
        texts = [*chain.from_iterable(translator.translate(self.corpus.sources.split("valid"), 0, len(references)))]
        pl_module.log("valid/bleu", score_translations(texts, references)["bleu"])


class TranslationModule(LanguageModel):
    """Trains translation; ``smoothing`` is the label smoothing of the plain training loss (Eq. 5 has none, as published)."""

    def __init__(self, *arguments: Any, smoothing: float = 0.0):
        super().__init__(*arguments)
        self.smoothing = smoothing

    def losses(self, batch: Batch, draw: float | None, plain: bool, progress: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the loss of each target piece in nats, and the memory's share of the mass."""
        if not (self.training and self.smoothing and (self.memory is None or plain)):
            return super().losses(batch, draw, plain, progress)
        f = self.reader.encode(batch).f[batch.scored]
        logits = F.linear(f, self.network.head.weight).float()
        losses = F.cross_entropy(logits, batch.targets[batch.scored], reduction="none", label_smoothing=self.smoothing)
        return losses, torch.zeros_like(losses)
