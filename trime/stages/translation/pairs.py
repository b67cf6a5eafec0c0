"""prepare for parallel text: both languages in the pieces that they share, sentence by sentence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.data.corpus import Corpus, Split, build_corpus, symbol_counts
from trime.data.datasets import Dataset
from trime.data.module import SINGLE_PROCESS, PlannedLoader, ProcessShard, WindowLoader
from trime.data.parallel.base import Parallel
from trime.data.parallel.side import JointBPE, PresegmentedText, Side, available_splits, sentences
from trime.data.segments import Segments, cut
from trime.data.tokenizers import Tokenizer
from trime.data.vocabulary import Vocabulary
from trime.stages.encode import Encode
from trime.stages.pack import Pack
from trime.stages.prepare import Prepare
from trime.stages.translation.import_checkpoint import Dictionaries
from trime.types import Batch, UserError

PIECES, CUT = "pieces.json", "cut.json"  # how sentences are cut here; of sentences that came cut, how words are put together


class ParallelCorpus(Corpus):
    """Targets as a corpus whose documents are sentences, and beside it the sources and the references."""

    @cached_property
    def sources(self) -> Corpus:
        return Corpus(self.folder / "source")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What cuts sentences into pieces, and makes text of them again."""
        if (self.folder / PIECES).exists():
            return JointBPE.load(self.folder / PIECES)
        return PresegmentedText(**json.loads((self.folder / CUT).read_text()))

    def references(self, split: str) -> list[str]:
        """The translations as they were written."""
        return json.loads((self.folder / f"{split}.references.json").read_text())

    def with_source(self, batch: Batch, source: Split) -> Batch:
        """A batch of targets with the sentences that they translate."""
        offsets = source.offsets
        found = batch.document.tolist()
        rows: list[Any] = [source.tokens[offsets[d] : offsets[d + 1]] if d >= 0 else [] for d in found]
        width = max(1, max(map(len, rows)))
        filled = np.full((len(rows), width), self.vocabulary.special_ids.pad, np.int64)
        for place, row in enumerate(rows):
            filled[place, : len(row)] = row
        return batch._replace(source=torch.from_numpy(filled))


class PreparePairs(Prepare):
    """A parallel corpus in vocabularies of its own, or in an imported model's ``dictionaries``."""

    def __init__(self, config: DictConfig, own: DictConfig, dictionaries: Dictionaries | None = None):
        super().__init__(config, own)
        self.dictionaries = dictionaries

    @cached_property
    def text(self) -> Parallel:
        found = instantiate(self.own, _convert_="all")
        if not isinstance(found, Parallel):
            raise UserError("this experiment translates: choose dataset=phrases, multi30k, iwslt14 or parallel")
        if found.detokenize and not found.cut:
            raise UserError(
                "dataset.detokenize=true is for text that comes in pieces of Moses' tokens: set dataset.cut=true too"
            )
        return found

    @cached_property
    def dataset(self) -> Dataset:
        return Side(self.text, 1, PresegmentedText())

    def settings(self) -> Any:
        own = {"joined": self.config.translation.joined_dictionary}
        dictionaries = self.dictionaries.fingerprints if self.dictionaries else own
        return super().settings() | {"languages": self.text.languages, "dictionaries": dictionaries}

    def build(self, folder: Path) -> None:
        text, tokenizer = self.text, self.tokenizer(folder)
        source, target = (Side(text, side, tokenizer) for side in (0, 1))
        vocabularies = self.dictionaries or self.own_dictionaries(source, target)
        (folder / "source").mkdir(exist_ok=True)
        build_corpus(source, folder / "source", vocabularies.source)
        build_corpus(target, folder, vocabularies.target)
        for split in available_splits(text):
            references = [pair.target if not text.cut else tokenizer.text(pair.target.split()) for pair in text.pairs(split)]
            (folder / f"{split}.references.json").write_text(json.dumps(references, ensure_ascii=False))
        self.tell(folder)

    def tokenizer(self, folder: Path) -> Tokenizer:
        """Return what cuts the text, after writing how into ``folder``."""
        if self.text.cut:
            detokenizer = {"moses": self.text.languages[1] if self.text.detokenize else None}
            (folder / CUT).write_text(json.dumps(detokenizer))
            return PresegmentedText(**detokenizer)
        if self.dictionaries:
            raise UserError(
                "a released checkpoint reads Moses' tokens in pieces of its own codes: prepare the text as fairseq's "
                "prepare-iwslt14.sh does and set dataset.cut=true"
            )
        pieces = JointBPE.train(sentences(self.text, "train"), self.config.vocabulary.limit or 32000)
        pieces.save(folder / PIECES)
        return pieces

    def own_dictionaries(self, source: Side, target: Side) -> Dictionaries:
        """Return one dictionary of both languages, or one of each (fairseq-preprocess with --joined-dictionary or without)."""
        counts = symbol_counts(source), symbol_counts(target)
        if self.config.translation.joined_dictionary:
            joined = Vocabulary.fairseq_from_counts(counts[0] + counts[1], None, 1)
            return Dictionaries(joined, joined)
        return Dictionaries(*(Vocabulary.fairseq_from_counts(own, None, 1) for own in counts))

    def corpus(self) -> ParallelCorpus:
        return ParallelCorpus(self.path())


def sentence_segments(text: Split) -> Segments:
    """Each sentence whole."""
    return cut(text.offsets, int(text.lengths.max()))


def first_sentences(text: Split, budget: int | None) -> Segments:
    """As many whole sentences as a budget of pieces holds; all where there is none."""
    every = sentence_segments(text)
    return every if budget is None else every.take(slice(0, max(1, int((every.length.cumsum() <= budget).sum()))))


class PackSentences(Pack):
    """The BM25 neighbours of every training target (TRIME Appendix C)."""

    def segments(self, text: Split) -> Segments:
        return sentence_segments(text)


class PairLoader(PlannedLoader):
    """Planned batches of targets, with their sources."""

    def __init__(self, corpus: ParallelCorpus, *given: Any):
        super().__init__(*given)
        self.corpus, self.source = corpus, corpus.sources.split("train")

    def plan(self, epoch: int) -> list[list[int]]:
        """By the longer side of each pair."""
        document, begin, start, length, context = self.segments
        longer = Segments(document, begin, start, np.maximum(length, self.source.lengths), context)
        return self.batching.plan(longer, epoch, self.neighbours)

    def batch(self, plan: list[list[int]], number: int) -> Batch:
        return self.corpus.with_source(super().batch(plan, number), self.source)


class PairWindows(WindowLoader):
    """The batches of a plan over the targets of a split, with their sources."""

    def __init__(
        self, corpus: ParallelCorpus, split: str, windows: Segments, plan: list[list[int]], share: ProcessShard = SINGLE_PROCESS
    ):
        super().__init__(corpus.split(split), windows, plan, corpus.vocabulary.special_ids, share)
        self.corpus, self.source = corpus, corpus.sources.split(split)

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield self.corpus.with_source(batch, self.source)


class EncodePairs(Encode):
    """The targets of a split as the model sees them, each piece given the source and the pieces before it."""

    def settings(self) -> Any:
        return super().settings() | {"key": self.config.model.backbone.key}

    def build(self, folder: Path) -> None:
        corpus = self.corpus.corpus()
        assert isinstance(corpus, ParallelCorpus)
        read = self.model.read("model.json").get("source_fingerprint")
        if read not in (None, corpus.sources.vocabulary.fingerprint):
            raise UserError("the model was trained with another dictionary of the source language: name its own text, dataset=")
        super().build(folder)

    def windows(self, corpus: Corpus) -> Segments:
        """As many whole sentences as the budget holds."""
        return first_sentences(corpus.split(self.split), self.budget())

    def loader(self, corpus: Corpus, windows: Segments, plan: list[list[int]]) -> Iterable[Batch]:
        assert isinstance(corpus, ParallelCorpus)
        return PairWindows(corpus, self.split, windows, plan)
