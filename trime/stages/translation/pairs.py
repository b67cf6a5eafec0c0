"""prepare for parallel text: tokenizes both languages into shared pieces, sentence by sentence."""

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
from trime.data.module import (
    SINGLE_PROCESS,
    PlannedLoader,
    ProcessShard,
    TextDataModule,
    WindowLoader,
    sequential_batches,
)
from trime.data.parallel.base import Parallel
from trime.data.parallel.side import JointBPE, PresegmentedText, Side, available_splits, sentences
from trime.data.segments import Segments, cut
from trime.data.tokenizers import Tokenizer
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.stages.prepare import PreparedText, log_statistics
from trime.stages.translation.import_checkpoint import Dictionaries
from trime.stages.windows import Portion, Windows
from trime.types import Batch

PIECES, CUT = "pieces.json", "cut.json"  # the learned pieces; or how the words of pre-tokenized text are joined


class ParallelCorpus(Corpus):
    """A corpus whose documents are target sentences, with their sources and references."""

    @cached_property
    def sources(self) -> Corpus:
        """The corpus of source sentences."""
        return Corpus(self.folder / "source")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of both languages, which also joins pieces into text."""
        if (self.folder / PIECES).exists():
            return JointBPE.load(self.folder / PIECES)
        return PresegmentedText(**json.loads((self.folder / CUT).read_text()))

    def references(self, split: str) -> list[str]:
        """Return the reference translations of a split, untokenized."""
        return json.loads((self.folder / f"{split}.references.json").read_text())

    def with_source(self, batch: Batch, source: Split) -> Batch:
        """Return a batch of targets with the source sentences that they translate."""
        offsets, documents = source.offsets, batch.document.tolist()
        rows: list[Any] = [source.tokens[offsets[d] : offsets[d + 1]] if d >= 0 else [] for d in documents]
        width = max(1, max(map(len, rows)))
        padded = np.full((len(rows), width), self.vocabulary.special_ids.pad, np.int64)
        for number, row in enumerate(rows):
            padded[number, : len(row)] = row
        return batch._replace(source=torch.from_numpy(padded))


class PreparePairs(PreparedText):
    """The parallel corpus of a dataset, in its own vocabularies or in an imported model's ``dictionaries``."""

    depends_on = ("vocabulary", "translation.joined_dictionary")

    def __init__(self, config: DictConfig, dataset_config: DictConfig, dictionaries: Dictionaries | None = None):
        super().__init__(config, dataset_config)
        self.dictionaries = dictionaries

    @cached_property
    def text(self) -> Parallel:
        """The parallel text; UserError if the dataset is not parallel text."""
        text = instantiate(self.dataset_config, _convert_="all")
        if not isinstance(text, Parallel):
            raise UserError("this experiment translates: choose dataset=phrases, multi30k, iwslt14 or parallel")
        if text.detokenize and not text.cut:
            raise UserError(
                "dataset.detokenize=true is for text that comes in pieces of Moses' tokens: set dataset.cut=true too"
            )
        return text

    @cached_property
    def dataset(self) -> Dataset:
        """The target side as a dataset."""
        return Side(self.text, 1, PresegmentedText())

    def settings(self) -> Any:
        dictionaries = {"dictionaries": self.dictionaries.fingerprints} if self.dictionaries else {}
        return super().settings() | {"languages": self.text.languages} | dictionaries

    def build(self, folder: Path) -> None:
        text, tokenizer = self.text, self.tokenizer(folder)
        source, target = (Side(text, side, tokenizer) for side in (0, 1))
        vocabularies = self.dictionaries or self.training_dictionaries(source, target)
        (folder / "source").mkdir(exist_ok=True)
        build_corpus(source, folder / "source", vocabularies.source)
        build_corpus(target, folder, vocabularies.target)
        for split in available_splits(text):
            references = [pair.target if not text.cut else tokenizer.text(pair.target.split()) for pair in text.pairs(split)]
            (folder / f"{split}.references.json").write_text(json.dumps(references, ensure_ascii=False))
        log_statistics(folder)

    def tokenizer(self, folder: Path) -> Tokenizer:
        """Return the tokenizer of the text, after writing it to ``folder``."""
        if self.text.cut:
            detokenizer = {"moses": self.text.languages[1] if self.text.detokenize else None}
            (folder / CUT).write_text(json.dumps(detokenizer))
            return PresegmentedText(**detokenizer)
        if self.dictionaries:
            raise UserError(
                "a released checkpoint reads Moses' tokens in pieces of its own BPE codes: prepare the text as fairseq's "
                "prepare-iwslt14.sh does and set dataset.cut=true"
            )
        pieces = JointBPE.train(sentences(self.text, "train"), self.config.vocabulary.limit or 32000)
        pieces.save(folder / PIECES)
        return pieces

    def training_dictionaries(self, source: Side, target: Side) -> Dictionaries:
        """Return one dictionary for both languages, or one for each (as fairseq-preprocess --joined-dictionary or without)."""
        counts = symbol_counts(source), symbol_counts(target)
        if self.config.translation.joined_dictionary:
            joined = Vocabulary.fairseq_from_counts(counts[0] + counts[1], None, 1)
            return Dictionaries(joined, joined)
        return Dictionaries(*(Vocabulary.fairseq_from_counts(count, None, 1) for count in counts))

    def corpus(self) -> ParallelCorpus:
        """Return the finished corpus."""
        return ParallelCorpus(self.path())


def sentence_segments(text: Split) -> Segments:
    """Return one segment per sentence."""
    return cut(text.offsets, int(text.lengths.max()))


def first_sentences(text: Split, budget: int | None) -> Segments:
    """Return as many whole sentences as fit in a budget of pieces, at least one; all if there is no budget."""
    segments = sentence_segments(text)
    return segments if budget is None else segments.take(slice(0, max(1, int((segments.length.cumsum() <= budget).sum()))))


class PairLoader(PlannedLoader):
    """Planned batches of training targets, with their sources."""

    def __init__(self, corpus: ParallelCorpus, *arguments: Any):
        super().__init__(*arguments)
        self.corpus, self.source = corpus, corpus.sources.split("train")

    def plan(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch, planned by the longer side of each pair."""
        document, offset, start, length, context = self.segments
        longer = Segments(document, offset, start, np.maximum(length, self.source.lengths), context)
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


class PairDataModule(TextDataModule):
    """The training batches of sentence pairs, and the first sentences of the validation split; ``folder`` is their corpus."""

    corpus: ParallelCorpus

    def open_corpus(self) -> ParallelCorpus:
        return ParallelCorpus(self.folder)

    def cut_training(self) -> Segments:
        return sentence_segments(self.text)

    def cut_validation(self) -> Segments:
        return first_sentences(self.valid, self.validate_tokens)

    def train_dataloader(self) -> PairLoader:
        parts = (self.text, self.segments, self.batching, self.neighbours)
        return PairLoader(self.corpus, *parts, self.steps, self.special_ids, self.share)

    def val_dataloader(self) -> PairWindows:
        size = max(1, self.batching.tokens // int(self.windows.length.max()))  # type: ignore[attr-defined]
        return PairWindows(self.corpus, "valid", self.windows, sequential_batches(self.windows, size), self.share)


class SentenceWindows(Windows):
    """Windows of one target sentence each, read with its source, as many as fit in the budget."""

    def cut(self, corpus: Corpus, portion: Portion) -> Segments:
        return first_sentences(corpus.split(portion.split), portion.tokens)

    def loader(self, corpus: Corpus, split: str, windows: Segments, plan: list[list[int]]) -> Iterable[Batch]:
        assert isinstance(corpus, ParallelCorpus)
        return PairWindows(corpus, split, windows, plan)

    def check(self, corpus: Corpus, description: dict[str, Any]) -> None:
        assert isinstance(corpus, ParallelCorpus)
        if description.get("source_fingerprint") not in (None, corpus.sources.vocabulary.fingerprint):
            raise UserError("the model was trained with another source dictionary: set dataset= to the text it was trained on")
