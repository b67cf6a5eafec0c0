"""The artefacts of a translation experiment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trime.common.io import plain
from trime.data.corpus import Corpus
from trime.data.parallel.corpus import ParallelCorpus, first_sentences
from trime.data.segments import Segments
from trime.data.vocabulary import Vocabulary
from trime.decoding.translator import SearchSettings
from trime.errors import UserError
from trime.stages.encode import Encode
from trime.stages.graph import Graph
from trime.stages.memories import Memories
from trime.stages.prepare import VocabularySettings
from trime.stages.training_task import task_settings
from trime.stages.translation.import_checkpoint import SOURCE, TARGET, Dictionaries, ImportTranslation
from trime.stages.translation.prepare import PreparePairs
from trime.stages.translation.training_task import TranslationTraining
from trime.stages.translation.translate import EvaluateTranslations, Translate, TuneByBleu
from trime.stages.tune import TunedRows
from trime.stages.windows import Portion, Windows


@dataclass(frozen=True)
class SentenceWindows(Windows):
    """Windows of one target sentence each, read with its source, as many as fit in the budget."""

    def cut(self, corpus: Corpus, portion: Portion) -> Segments:
        return first_sentences(corpus.split(portion.split), portion.tokens)

    def check(self, corpus: Corpus, description: dict[str, Any]) -> None:
        assert isinstance(corpus, ParallelCorpus)
        if description.get("source_fingerprint") not in (None, corpus.sources.vocabulary.fingerprint):
            raise UserError("the model was trained with another source dictionary: set dataset= to the text it was trained on")


class TranslationGraph(Graph):
    """Data flow of parallel text, with K chosen by BLEU on valid."""

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
        if isinstance(self.model, ImportTranslation):
            return self.model.dictionaries
        folder = self.model.folder  # of a model that an earlier run imported, or trained in the dictionaries of its corpus
        if not (folder / SOURCE).is_file():
            return None
        return Dictionaries(Vocabulary.load(folder / SOURCE), Vocabulary.load(folder / TARGET))

    @cached_property
    def tune(self) -> TuneByBleu:
        """The settings of every row, at the K of highest BLEU on valid."""
        searched = any(kind.is_searched for kind in self.memories.kinds.values())
        ks = plain(self.config.translation.k) if searched else [self.config.index.k]
        tunes: dict[int, TunedRows] = {}
        for k in ks:
            config: DictConfig = OmegaConf.merge(self.config, {"index": {"k": k}})  # type: ignore[assignment]
            tunes[k] = self.tune_with(Memories(self.table, replace(self.sources, config=config)))
        # Rows without memory come first, and do not depend on K: they are translated once.
        first = next((number for number, row in enumerate(self.table) if row.memories), len(self.table))
        without_memory = self.translate(self.valid, tunes[ks[0]], 0, first)
        with_memory = {k: self.translate(self.valid, tune, first, None) for k, tune in tunes.items()}
        return TuneByBleu(tunes, without_memory, with_memory, self.lab)

    def translate(self, encoded: Encode, tune: TunedRows, first: int = 0, last: int | None = None) -> Translate:
        """Return the translations of a split by some rows of the table."""
        return Translate(encoded, tune, first, last, self.search, self.lab)

    @cached_property
    def search(self) -> SearchSettings:
        """Settings of the beam search."""
        names = ("beam", "length_penalty", "min_length", "sentences", "unweighted_external", "batch_size")
        settings = {name: self.config.translation[name] for name in names}
        limits, scaled = tuple(self.config.translation.max_length), self.config.evaluate.scaled_interpolation
        return SearchSettings(**settings, max_length=limits, scaled_interpolation=scaled, hardware=self.hardware)

    def training_task(self) -> TranslationTraining:
        translation = self.config.translation
        # While it trains, the model translates alone: there is no external memory to weight.
        by_bleu = self.config.train.keep == "best" and translation.best_by == "bleu"
        return TranslationTraining(
            **task_settings(self.config),
            smoothing=translation.smoothing,
            joined_dictionary=translation.joined_dictionary,
            best_by=replace(self.search, unweighted_external=False) if by_bleu else None,
        )

    def lengths_in_training(self) -> dict[str, int]:
        return {}  # it reads whole sentences

    def windows(self, config: DictConfig, for_datastore: bool) -> SentenceWindows:
        return SentenceWindows()

    @cached_property
    def evaluate(self) -> EvaluateTranslations:
        """The results on the test split."""
        return EvaluateTranslations(self.losses, self.translate(self.test, self.tune), self.lab)

    @property
    def largest_k(self) -> int:
        return max(self.config.translation.k)

    def check_windows(self) -> None:
        """Raise UserError if a sentence has more pieces than the model's positions."""
        # Sentences are read whole, so that only their lengths can be too large.
        positions, corpus = self.config.model.backbone.positions, self.corpus.corpus()
        for split in corpus.statistics["splits"]:
            for side in (corpus, corpus.sources):
                longest = int(side.split(split).lengths.max())
                if longest >= positions:
                    raise UserError(
                        f"split {split} has a sentence of {longest} pieces: raise model.backbone.positions={positions}"
                    )
