"""A callback that translates valid at every validation, to keep the weights with the highest BLEU."""

from __future__ import annotations

from itertools import chain

import pytorch_lightning as pl

from trime.data.parallel.corpus import ParallelCorpus
from trime.decoding.translator import SearchSettings, Translator
from trime.scoring.mixture_spec import MixtureSpec
from trime.stages.translation.translate import score_translations

MODEL_ALONE = MixtureSpec((), ())


class BleuValidation(pl.Callback):
    """Logs ``valid/bleu``: BLEU of the translations of valid by the model without memories, with this run's beam search."""

    def __init__(self, corpus: ParallelCorpus, settings: SearchSettings):
        self.corpus, self.settings = corpus, settings

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        translator = Translator(pl_module.network, MODEL_ALONE, None, self.corpus, self.settings)  # type: ignore[arg-type]
        references = self.corpus.references("valid")[: self.settings.sentences]
        texts = [*chain.from_iterable(translator.translate(self.corpus.sources.split("valid"), 0, len(references)))]
        pl_module.log("valid/bleu", score_translations(texts, references)["bleu"])
