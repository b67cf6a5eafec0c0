"""Parallel text in memory-mapped arrays, and its batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from trime.data.corpus import Corpus, Split
from trime.data.module import TextDataModule, WindowLoader, sequential_batches
from trime.data.segments import Segments, cut
from trime.data.tokenizers import Tokenizer
from trime.translation.pieces import JointBPE, PresegmentedText

PIECES, CUT = "pieces.json", "cut.json"  # the learned pieces; or how the words of pre-tokenized text are joined


class ParallelCorpus(Corpus):
    """A corpus whose documents are target sentences, with their sources and references."""

    @cached_property
    def sources(self) -> Corpus:
        return Corpus(self.folder / "source")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of both languages, which also joins pieces into text."""
        if (self.folder / PIECES).exists():
            return JointBPE.load(self.folder / PIECES)
        return PresegmentedText(**json.loads((self.folder / CUT).read_text(encoding="utf-8")))

    def split(self, name: str) -> Split:
        return super().split(name)._replace(sources=self.sources.split(name))

    def documents(self, split: str) -> Iterator[np.ndarray]:
        """Yield the tokens of each pair of sentences."""
        for source, target in zip(self.sources.documents(split), super().documents(split), strict=True):
            yield np.concatenate([source, target])

    def references(self, split: str) -> list[str]:
        """Return the reference translations of a split, untokenized."""
        return json.loads((self.folder / f"{split}.references.json").read_text(encoding="utf-8"))

    def source_text(self, split: str, number: int) -> str:
        """Return the source sentence of this number in a split, as text without ``<eos>``."""
        vocabulary = self.sources.vocabulary
        pieces = self.sources.split(split).document(number).tolist()
        return self.tokenizer.text([vocabulary.symbols[piece] for piece in pieces if piece != vocabulary.special_ids.eos])


def sentence_segments(text: Split) -> Segments:
    return cut(text.offsets, int(text.lengths.max()))


def first_sentences(text: Split, budget: int | None) -> Segments:
    """Return as many whole sentences as fit in a budget of pieces, at least one; all if there is no budget."""
    segments = sentence_segments(text)
    return segments if budget is None else segments.take(slice(0, max(1, int((segments.length.cumsum() <= budget).sum()))))


class PairDataModule(TextDataModule):
    """The training batches of sentence pairs, and the first sentences of the validation split; ``folder`` is their corpus."""

    def open_corpus(self) -> ParallelCorpus:
        return ParallelCorpus(self.folder)

    def cut(self) -> tuple[Segments, Segments]:
        return sentence_segments(self.text), first_sentences(self.valid, self.validate_tokens)

    def val_dataloader(self) -> WindowLoader:
        size = max(1, self.batching.tokens // int(self.windows.length.max()))  # type: ignore[attr-defined]
        plan = sequential_batches(self.windows, size)
        return WindowLoader(self.valid, self.windows, plan, self.corpus.vocabulary.special_ids, self.shard)
