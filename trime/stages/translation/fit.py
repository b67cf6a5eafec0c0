"""fit of a translation experiment: trains on sentence pairs (TRIME section 5.4, Appendix C)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from hydra.utils import instantiate
from omegaconf import OmegaConf

from trime.io import plain
from trime.models.network import Network, build_network
from trime.pipeline.model_io import model_of, write_description
from trime.stages.fit import Fit
from trime.stages.translation.bleu_validation import BleuValidation
from trime.stages.translation.pairs import PairDataModule, ParallelCorpus
from trime.tasks.callbacks.checkpoints import BestWeights
from trime.tasks.translation import Translation


class FitTranslation(Fit):
    """The trained translation model."""

    depends_on = (*Fit.depends_on, "translation.smoothing", "translation.joined_dictionary")
    unhashed = (*Fit.unhashed, "translation", "evaluate.scaled_interpolation")

    def settings(self) -> Any:
        translation = plain(self.config.translation)
        search = {name: translation[name] for name in ("beam", "penalty", "shortest", "longest", "sentences")}
        return super().settings() | {"smoothing": translation["smoothing"]} | ({"best_by": search} if self.by_bleu else {})

    @property
    def by_bleu(self) -> bool:
        """Whether the best validation is the one with the highest BLEU."""
        return self.config.train.keep == "best" and self.config.translation.best_by == "bleu"

    def model_callbacks(self, folder: Path, network: Network) -> list[pl.Callback]:
        corpus = self.corpus.corpus()
        assert isinstance(corpus, ParallelCorpus)
        return [*super().model_callbacks(folder, network), *([BleuValidation(corpus, self.config)] if self.by_bleu else [])]

    def best_weights(self, folder: Path) -> BestWeights:
        return BestWeights(folder, "valid/bleu", highest=True) if self.by_bleu else super().best_weights(folder)

    def network(self, corpus: Any) -> Network:
        return build_network(OmegaConf.create(self.model(corpus)), len(corpus.vocabulary))

    def model(self, corpus: ParallelCorpus) -> dict[str, Any]:
        """Return the description of the model, with a table for the source language if it has its own dictionary."""
        model = model_of(self.config)
        if not self.config.translation.joined_dictionary:
            model["backbone"]["source_vocabulary"] = len(corpus.sources.vocabulary)
        return model

    def write_description(self, folder: Path, corpus: Any, trained: dict[str, Any]) -> None:
        write_description(folder, self.model(corpus), corpus.vocabulary, trained, source=corpus.sources.vocabulary)

    def data(self, corpus: Any, is_stateful: bool) -> PairDataModule:
        """Return the training batches in planned order, and the first sentences of the validation split."""
        batching, neighbours = instantiate(self.config.batching, _convert_="all"), self.neighbours()
        tokens = self.config.train.validate_tokens
        return PairDataModule(None, corpus.folder, batching, validate_tokens=tokens, neighbours=neighbours)

    def task(self, network: Network) -> Translation:
        task = super().task(network)
        parts = (task.memory, task.training_, task.optimizer_factory, task.schedule)
        return Translation(network, *parts, smoothing=self.config.translation.smoothing)
