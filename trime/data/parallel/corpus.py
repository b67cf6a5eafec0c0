"""Parallel text in memory-mapped arrays, and its batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch

from trime.data.byte_pairs import JointBPE, PresegmentedText
from trime.data.corpus import Corpus, Split
from trime.data.module import SINGLE_PROCESS, PlannedLoader, ProcessShard, TextDataModule, WindowLoader, sequential_batches
from trime.data.segments import Segments, cut
from trime.data.tokenizers import Tokenizer
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

    def documents(self, split: str) -> Iterator[np.ndarray]:
        """Yield the tokens of each pair of sentences."""
        for source, target in zip(self.sources.documents(split), super().documents(split), strict=True):
            yield np.concatenate([source, target])

    def references(self, split: str) -> list[str]:
        """Return the reference translations of a split, untokenized."""
        return json.loads((self.folder / f"{split}.references.json").read_text())

    def source_text(self, split: str, number: int) -> str:
        """Return the source sentence of this number in a split, as text without ``<eos>``."""
        vocabulary = self.sources.vocabulary
        pieces = self.sources.split(split).document(number).tolist()
        return self.tokenizer.text([vocabulary.symbols[piece] for piece in pieces if piece != vocabulary.special_ids.eos])

    def with_source(self, batch: Batch, source: Split) -> Batch:
        """Return a batch of targets with the source sentences that they translate."""
        rows: list[Any] = [source.document(number) if number >= 0 else [] for number in batch.document.tolist()]
        width = max(1, max(map(len, rows)))
        padded = np.full((len(rows), width), self.vocabulary.special_ids.pad, np.int64)
        for number, row in enumerate(rows):
            padded[number, : len(row)] = row
        return batch._replace(source=torch.from_numpy(padded))


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
        self, corpus: ParallelCorpus, split: str, windows: Segments, plan: list[list[int]], shard: ProcessShard = SINGLE_PROCESS
    ):
        super().__init__(corpus.split(split), windows, plan, corpus.vocabulary.special_ids, shard)
        self.corpus, self.source = corpus, corpus.sources.split(split)

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield self.corpus.with_source(batch, self.source)


class PairDataModule(TextDataModule):
    """The training batches of sentence pairs, and the first sentences of the validation split; ``folder`` is their corpus."""

    corpus: ParallelCorpus

    def open_corpus(self) -> ParallelCorpus:
        return ParallelCorpus(self.folder)

    def cut(self) -> tuple[Segments, Segments]:
        return sentence_segments(self.text), first_sentences(self.valid, self.validate_tokens)

    def train_dataloader(self) -> PairLoader:
        planned = (self.text, self.segments, self.batching, self.neighbours)
        return PairLoader(self.corpus, *planned, self.steps, self.corpus.vocabulary.special_ids, self.shard)

    def val_dataloader(self) -> PairWindows:
        size = max(1, self.batching.tokens // int(self.windows.length.max()))  # type: ignore[attr-defined]
        return PairWindows(self.corpus, "valid", self.windows, sequential_batches(self.windows, size), self.shard)
