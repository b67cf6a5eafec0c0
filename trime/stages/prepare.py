"""prepare: tokenizes text into memory-mapped arrays, with its own vocabulary or a given one."""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trime.common.components import build
from trime.common.identity import Free
from trime.data.byte_pairs import BytePairs
from trime.data.corpus import (
    Corpus,
    VocabularySource,
    build_corpus,
    count_training_symbols,
    learn_symbols,
    symbol_counts,
    training_vocabulary,
)
from trime.data.datasets import Dataset
from trime.data.tokenizers import metric_of
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.lab.artefact import Artefact, Lab
from trime.lab.provenance import identify_text
from trime.lab.stage import Stage

log = logging.getLogger(__name__)

LEARNED = "tokenizer.json"  # in a prepared text: the pieces that its tokenizer learned


@dataclass(frozen=True)
class VocabularySettings:
    """The section ``vocabulary``: how many symbols of the training split have a token."""

    max_size: int | None
    min_count: int
    fairseq: bool


@dataclass(frozen=True, eq=False, repr=False)
class Prepare(Artefact):
    """The corpus of a dataset, in a vocabulary of its own or in that of another text or model."""

    kind, format = "prepare", 2

    described: Free[dict[str, Any]]  # the dataset, as conf/dataset describes it; identity() leaves its place out
    vocabulary: VocabularySettings
    lab: Free[Lab]
    others: Free[VocabularySource | None] = None

    def root(self) -> Path:
        """Return ``paths.data/prepared``, which experiments share."""
        return self.lab.data / "prepared"

    def identity(self) -> Any:
        others = {"vocabulary": self.others.name} if self.others else {}
        return super().identity() | self.text_identity() | others

    def text_identity(self) -> dict[str, Any]:
        """Return the identity of the text, wherever it lies: the settings of the dataset, and a hash of its files."""
        return {"dataset": identify_text(copy.deepcopy(self.described)), "content": self.dataset.fingerprint()}

    @property
    def metric(self) -> str:
        """The unit of results: perplexity, bits per character or bits per byte."""
        return metric_of(self.dataset.tokenizer, self.corpus().statistics["characters"])

    def corpus(self) -> Corpus:
        """Return the finished corpus."""
        return Corpus(self.path())

    def source(self) -> VocabularySource:
        """Return this corpus's vocabulary as a source for other corpora."""
        tokenizer = self.others.tokenizer if self.others else self.learned
        return VocabularySource(self.fingerprint, lambda: self.corpus().vocabulary, tokenizer)

    @cached_property
    def dataset(self) -> Dataset:
        """The dataset; UserError if it is none of a text."""
        dataset = build(self.described)
        if not isinstance(dataset, Dataset):
            kind = type(dataset).__name__
            raise UserError(f"{kind} is no text of documents: parallel text is for experiment=mt_vanilla, knn_mt or trime_mt")
        dataset.lab_folders = lab_folders(self.lab)
        if self.others and self.others.tokenizer:
            dataset.tokenizer, dataset.characters = self.others.tokenizer, False
        elif isinstance(dataset.tokenizer, BytePairs):
            dataset.tokenizer.saved = lambda: self.path() / LEARNED
        return dataset

    @property
    def learned(self) -> BytePairs | None:
        """The tokenizer that learns from this text, if there is one."""
        tokenizer = self.dataset.tokenizer
        return tokenizer if isinstance(tokenizer, BytePairs) and not self.others else None

    def build(self, folder: Path) -> None:
        source = self.others
        if self.learned:
            learn_symbols(self.dataset, self.learned, self.vocabulary.max_size, self.vocabulary.min_count)
            self.learned.save(folder / LEARNED)
        build_corpus(self.dataset, folder, source.vocabulary() if source else self.training_vocabulary())
        if source and source.tokenizer and not any(source.vocabulary().counts):
            count_training_symbols(folder)
        log_statistics(folder)

    def training_vocabulary(self) -> Vocabulary:
        """Return the vocabulary of the training split's symbols."""
        settings = self.vocabulary
        if self.learned:
            counts = Counter(dict.fromkeys(self.learned.pieces.get_vocab(), 0))
            counts.update(symbol_counts(self.dataset))
            return Vocabulary.from_counts(counts, None, 0)
        return training_vocabulary(self.dataset, settings.max_size, settings.min_count, settings.fairseq)


def lab_folders(lab: Lab) -> tuple[Path, ...]:
    """Return the folders in which the lab writes; a user's text may lie beside them in ``paths.outputs`` or ``paths.data``."""
    inside = [lab.outputs / name for name in ("runs", "artefacts", "reports", "sweeps")]
    return (lab.outputs, *inside, *(lab.data / name for name in ("prepared", "packed", "raw")))


def log_statistics(folder: Path) -> None:
    """Log of the corpus in a folder: vocabulary size, tokens per split, mean document length (TRIME Table 8), and notes."""
    statistics = json.loads((folder / "statistics.json").read_text(encoding="utf-8"))
    lines = [f"{statistics['name']}: vocabulary {statistics['vocabulary']:,}"]
    for name, split in statistics["splits"].items():
        share = 100 * split["unknown"] / split["tokens"]
        lines.append(
            f"  {name:<5} {split['tokens']:>13,} tokens {split['documents']:>9,} documents "
            f"of {split['mean_length']:,.1f} on average, {share:.2f} % <unk>"
        )
    log.info("\n".join([*lines, *(f"  note: {note}" for note in statistics["notes"])]))


def log_duplicates(graph: Any) -> None:
    """Log which documents of the splits and of datastores are the same."""
    for note in graph.duplicates:
        log.warning(f"note: {note}")


PREPARE = Stage(
    "prepare",
    lambda graph: [graph.corpus, graph.evaluated_corpus, *(each.text for each in graph.memories.stored.values())],
    report=log_duplicates,
)
