"""A callback that translates valid at every validation, to keep the weights with the highest BLEU."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig

from trime.evaluation.rows import MixtureSpec
from trime.stages.translation.pairs import ParallelCorpus
from trime.stages.translation.translate import Translator, score_translations

MODEL_ALONE = MixtureSpec((), ())


class BleuValidation(pl.Callback):
    """Logs ``valid/bleu``: BLEU of the translations of valid by the model without memories, with this run's beam search."""

    def __init__(self, corpus: ParallelCorpus, config: DictConfig):
        self.corpus, self.config = corpus, config

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        translator = Translator(pl_module.network, MODEL_ALONE, None, self.corpus, self.config)  # type: ignore[arg-type]
        references = self.corpus.references("valid")[: self.config.translation.sentences]
        source, size, texts = self.corpus.sources.split("valid"), self.config.translation.batch_size, []
        for start in range(0, len(references), size):
            numbers = range(start, min(start + size, len(references)))
            sentences = [source.tokens[source.offsets[n] : source.offsets[n + 1]].tolist() for n in numbers]
            texts += translator(sentences, torch.tensor(numbers))
        pl_module.log("valid/bleu", score_translations(texts, references)["bleu"])
