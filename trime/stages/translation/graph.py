"""The artefacts of a translation experiment."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from omegaconf import DictConfig, OmegaConf

from trime.common.io import plain
from trime.errors import UserError
from trime.stages.evaluate import Evaluate
from trime.stages.graph import Graph
from trime.stages.memories import Memories
from trime.stages.mixture import build_tune
from trime.stages.prepare import VocabularySettings
from trime.stages.translation.evaluate import EvaluateTranslations
from trime.stages.translation.import_checkpoint import Dictionaries, ImportTranslation
from trime.stages.translation.prepare import PreparePairs
from trime.stages.translation.training_task import TranslationTraining
from trime.stages.translation.translate import Translate
from trime.stages.translation.tune import TuneByBleu
from trime.stages.translation.windows import SentenceWindows
from trime.stages.tune import TunedRows


class TranslationGraph(Graph):
    """Data flow of parallel text, with K chosen by BLEU on valid."""

    training = TranslationTraining
    windows = SentenceWindows
    importer = ImportTranslation
    cuts_segments = False

    @cached_property
    def corpus(self) -> PreparePairs:
        """The parallel corpus."""
        vocabulary = VocabularySettings(self.config.vocabulary.max_size, 0, False)
        joined = self.config.translation.joined_dictionary
        return PreparePairs(plain(self.config.dataset), vocabulary, self.lab, joined, self.dictionaries)

    @cached_property
    def dictionaries(self) -> Dictionaries | None:
        """The dictionaries of an imported model, in which all text is read; None if the corpus makes its own."""
        if not self.config.checkpoint:
            return None
        model = self.model
        return model.dictionaries if isinstance(model, ImportTranslation) else Dictionaries.of_folder(model.folder)

    @cached_property
    def tune(self) -> TuneByBleu:
        """The settings of every row, at the K of highest BLEU on valid."""
        searched = any(kind.is_searched for kind in self.memories.kinds.values())
        ks = plain(self.config.translation.k) if searched else [self.config.index.k]
        tunes = {k: self.tune_at(k) for k in ks}
        rows = self.table
        first = next((number for number, row in enumerate(rows) if row.memories), len(rows))
        without_memory = Translate(self.config, self.valid, tunes[ks[0]], self.run_parts, slice(0, first))
        with_memory = {
            k: Translate(self.config, self.valid, tune, self.run_parts, slice(first, None)) for k, tune in tunes.items()
        }
        return TuneByBleu(self.config, tunes, without_memory, with_memory)

    def tune_at(self, k: int) -> TunedRows:
        """Return the tuned temperatures and interpolation shares when K entries are retrieved."""
        config: DictConfig = OmegaConf.merge(self.config, {"index": {"k": k}})  # type: ignore[assignment]
        memories = Memories(self.table, replace(self.sources, config=config))
        return build_tune(config, self.table, self.valid, memories, self.run_parts)

    @cached_property
    def evaluate(self) -> EvaluateTranslations:
        """The results on the test split."""
        losses = Evaluate(self.config, self.test, self.tune, self.run_parts)
        return EvaluateTranslations(self.config, losses, Translate(self.config, self.test, self.tune, self.run_parts))

    @property
    def largest_k(self) -> int:
        return max(self.config.translation.k)

    def check_windows(self) -> None:
        """Raise UserError if a sentence has more pieces than the model's positions."""
        positions, corpus = self.config.model.backbone.positions, self.corpus.corpus()
        for split in corpus.statistics["splits"]:
            for side in (corpus, corpus.sources):
                longest = int(side.split(split).lengths.max())
                if longest >= positions:
                    raise UserError(
                        f"split {split} has a sentence of {longest} pieces: raise model.backbone.positions={positions}"
                    )
