"""The artefacts of a translation experiment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trime.common.components import build
from trime.common.identity import Free
from trime.common.io import plain
from trime.config.schema import STAGES
from trime.data.batching.published import Budget
from trime.data.corpus import Corpus, Split
from trime.data.segments import Segments
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.models.network import Network
from trime.report.page import Section
from trime.report.run_result import ScoredRun
from trime.report.tables import Table
from trime.scoring.mixture_spec import FittedMixtureSpec
from trime.scoring.rows import traits_of
from trime.stages.encode import Encode, Portion, TextWindows
from trime.stages.graph import Graph
from trime.stages.memories import Memories, Sources
from trime.stages.model_io import ModelSettings
from trime.stages.pack import Pack
from trime.stages.prepare import VocabularySettings
from trime.stages.tune import TunedRows
from trime.translation.beam import SearchSettings
from trime.translation.encoder_decoder import EncoderDecoder
from trime.translation.import_checkpoint import SOURCE, TARGET, Dictionaries, ImportTranslation
from trime.translation.pairs.corpus import ParallelCorpus, first_sentences, sentence_segments
from trime.translation.prepare import PreparePairs
from trime.translation.samples import TranslationSamples
from trime.translation.training import TranslationTraining
from trime.translation.translate import EvaluateTranslations, Translate, TuneByBleu


@dataclass(frozen=True, kw_only=True)
class SentenceWindows(TextWindows):
    """Windows of one target sentence each, read with its source, as many as fit in the budget."""

    block: int = 0
    context: int = 0
    lines: bool = False
    section: Free[str] = "evaluate"

    def lengths(self) -> dict[str, int]:
        return {}  # the text decides

    def cut(self, corpus: Corpus, portion: Portion) -> Segments:
        return first_sentences(corpus.split(portion.split), portion.tokens)

    def check(self, corpus: Corpus, description: dict[str, Any]) -> None:
        assert isinstance(corpus, ParallelCorpus)
        if description.get("source_fingerprint") not in (None, corpus.sources.vocabulary.fingerprint):
            raise UserError("the model was trained with another source dictionary: set dataset= to the text it was trained on")


@dataclass(frozen=True, eq=False, repr=False)
class PackSentences(Pack):
    """The nearest neighbours of target sentences."""

    def identity(self) -> Any:
        return super().identity() | {"length": None}

    def segments(self, text: Split) -> Segments:
        return sentence_segments(text)


class TranslationGraph(Graph):
    """Data flow of parallel text, with K chosen by BLEU on valid."""

    importer, packer = ImportTranslation, PackSentences
    at_test = "index.metric"
    samples_title = "Translations"
    reads_pieces = True

    @cached_property
    def corpus(self) -> PreparePairs:
        """The parallel corpus."""
        vocabulary = VocabularySettings(self.config.vocabulary.max_size, 0, False)
        joined = self.config.translation.joined_dictionary
        return PreparePairs(
            plain(self.config.dataset), vocabulary, self.lab, joined_dictionary=joined, dictionaries=self.dictionaries
        )

    @cached_property
    def model_settings(self) -> ModelSettings:
        """Settings by which the model is built and reads text; the key of contexts is one of inference."""
        return ModelSettings.of(self.config, chosen_at_test=("key",))

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
        # While it trains, the model translates without memory: there is no external memory to weight.
        by_bleu = self.config.train.keep == "best" and translation.best_by == "bleu"
        return TranslationTraining.of(
            self.config,
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

    @cached_property
    def sources(self) -> Sources:
        """The artefacts that this run can make for memories; an index is searched with every K that is tried."""
        return Sources(self.config, self.text_of, self.store_of, self.lab, max(self.config.translation.k))

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

    def own_samples(self) -> TranslationSamples:
        """Return translations of the test split, annotated with the memory of the last row."""
        samples, (name,) = self.config.report.samples, self.table[-1].memories
        shown = samples.passages, samples.entries, samples.minutes
        return TranslationSamples(self.evaluate.translations, *shown, memory=self.memories.stored[name], lab=self.lab)

    def own_sections(self, run: ScoredRun) -> list[Section]:
        """Return a section of test sentences with their translations as a list, which is empty if none are to be shown."""
        count, rows = self.config.report.samples.passages, [row.memories for row in run.metrics["test"]]
        examples = self.evaluate.translations.examples(count) if count else []
        columns = "source", "reference", *rows
        shown = [Table(["", "text"], [*map(list, zip(columns, texts, strict=True))]) for texts in examples]
        note = "Sentences spread over test: the source, its reference, and the translation by each row of the table."
        return [Section("Translations", note, shown)] if shown else []

    def check_settings(self) -> None:
        """Raise UserError at the first setting that translation cannot work with."""
        config = self.config
        stages = {*config.stages} - {*STAGES}
        if stages:
            raise UserError(f"stage {min(stages)} is not for translation: leave it out of stages")
        if not isinstance(build(config.batching, "batching"), Budget):
            raise UserError("translation needs batching=budget or budget_bm25: leave others out")
        if config.vocabulary.max_size is None and not config.dataset.get("cut"):
            raise UserError(
                "vocabulary.max_size=null: the number of byte pairs to learn is needed: set vocabulary.max_size=10000"
            )
        max_length = list(config.translation.max_length)
        if len(max_length) != 2 or sum(max_length) <= 0:
            raise UserError(
                f"translation.max_length={max_length}: it must be two numbers a and b: n pieces become at most a n + b"
            )
        analysed = config.evaluate.analysis or config.evaluate.per_token
        if config.evaluate.dataset or config.datastore.dataset or analysed:
            names = "evaluate.dataset, datastore.dataset, evaluate.analysis, evaluate.per_token"
            raise UserError(f"translation has no {names}: leave them out")
        memories = [row.memories for row in self.table]
        first = sum(not own for own in memories)  # rows without memory
        own_k = [
            name
            for names in memories
            for name in names
            if OmegaConf.select(config, f"test_memories.{name}.index.k") is not None
        ]
        if own_k:
            raise UserError(
                f"test_memories.{own_k[0]}.index.k: of a translation, translation.k lists the K that are tried: set that alone"
            )
        searched = all(len(names) == 1 and traits_of(config, *names).is_searched for names in memories[first:])
        if not searched or any(memories[:first]) or not first:
            raise UserError("evaluate.rows: of a translation the first row has no memory, and later ones a datastore's alone")
        if any(isinstance(row, FittedMixtureSpec) for row in self.table) and config.mixture.model.get("history"):
            raise UserError("translations of a beam have no history: set mixture.model.history=[]")

    def check_network(self, network: Network) -> None:
        """Raise UserError unless a network reads source sentences."""
        if not isinstance(network.backbone, EncoderDecoder):
            raise UserError("translations need model=translation: leave other models out")
