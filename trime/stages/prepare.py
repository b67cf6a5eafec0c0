"""prepare: tokenizes text into memory-mapped arrays, with its own vocabulary or a given one."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.data.byte_pairs import BytePairs
from trime.data.corpus import (
    FLUSH,
    Corpus,
    TextCounts,
    VocabularySource,
    build_corpus,
    lines_with_progress,
    symbol_counts,
    training_vocabulary,
)
from trime.data.datasets import Dataset
from trime.data.notes import describe_duplicates, find_duplicates
from trime.data.tokenizers import metric_of
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.io import plain
from trime.pipeline.artefact import Artefact
from trime.pipeline.config_hash import identify_text
from trime.progress import Progress

log = logging.getLogger(__name__)

LEARNED = "tokenizer.json"  # in a prepared text: what a tokenizer has learned


class PreparedText(Artefact):
    """The corpus of a dataset."""

    kind, format = "prepare", 2

    def __init__(self, config: DictConfig, dataset_config: DictConfig):
        super().__init__(config)
        self.dataset_config = dataset_config

    def root(self) -> Path:
        """Return ``paths.data/prepared``, which experiments share."""
        return Path(self.config.paths.data).expanduser() / "prepared"

    @property
    @abstractmethod
    def dataset(self) -> Dataset:
        """The dataset; of parallel text, its target side."""

    def settings(self) -> Any:
        return super().settings() | self.content()

    def content(self) -> dict[str, Any]:
        """Return what decides which text it is: the settings of the dataset, and a hash of its files."""
        return {"dataset": identify_text(plain(self.dataset_config)), "content": self.dataset.fingerprint()}

    @property
    def metric(self) -> str:
        """The unit of results: perplexity, bits per character or bits per byte."""
        return metric_of(self.dataset.tokenizer, self.corpus().statistics["characters"])

    def corpus(self) -> Corpus:
        """Return the finished corpus."""
        return Corpus(self.path())

    def source(self) -> VocabularySource:
        """Return this corpus's vocabulary as a source for other corpora."""
        return VocabularySource(self.fingerprint, lambda: self.corpus().vocabulary)


class Prepare(PreparedText):
    """The corpus of a dataset, in a vocabulary of its own or in a given one (``vocabulary_source``)."""

    depends_on = ("vocabulary",)

    def __init__(self, config: DictConfig, dataset_config: DictConfig, vocabulary_source: VocabularySource | None = None):
        super().__init__(config, dataset_config)
        self.vocabulary_source = vocabulary_source

    @cached_property
    def dataset(self) -> Dataset:
        """The dataset; UserError if it is parallel text."""
        dataset = instantiate(self.dataset_config, _convert_="all")
        if not isinstance(dataset, Dataset):
            raise UserError(f"{type(dataset).__name__} is parallel text, for experiment=mt_vanilla, knn_mt or trime_mt")
        dataset.lab_folders = lab_folders(self.config.paths)
        if self.vocabulary_source and self.vocabulary_source.tokenizer:
            dataset.tokenizer, dataset.characters = self.vocabulary_source.tokenizer, False
        elif isinstance(dataset.tokenizer, BytePairs):
            dataset.tokenizer.saved = lambda: self.path() / LEARNED
        return dataset

    @property
    def learned(self) -> BytePairs | None:
        """The tokenizer that learns from this text, if there is one."""
        tokenizer = self.dataset.tokenizer
        return tokenizer if isinstance(tokenizer, BytePairs) and not self.vocabulary_source else None

    def settings(self) -> Any:
        return super().settings() | ({"vocabulary": self.vocabulary_source.name} if self.vocabulary_source else {})

    def build(self, folder: Path) -> None:
        source = self.vocabulary_source
        if self.learned:
            learn_symbols(self.dataset, self.learned, self.config.vocabulary)
            self.learned.save(folder / LEARNED)
        build_corpus(self.dataset, folder, source.vocabulary() if source else self.training_vocabulary())
        if source and source.tokenizer and not any(source.vocabulary().counts):
            count_training_symbols(folder)
        log_statistics(folder)

    def training_vocabulary(self) -> Vocabulary:
        """Return the vocabulary of the training split's symbols."""
        settings = self.config.vocabulary
        if self.learned:
            counts = Counter(dict.fromkeys(sorted(self.learned.pieces.get_vocab()), 0))
            counts.update(symbol_counts(self.dataset))
            return Vocabulary.from_counts(counts, None, 0)
        return training_vocabulary(self.dataset, settings.max_size, settings.min_count, settings.fairseq)

    def source(self) -> VocabularySource:
        given = self.vocabulary_source
        return super().source()._replace(tokenizer=given.tokenizer if given else self.learned)


def lab_folders(paths: DictConfig) -> tuple[Path, ...]:
    """Return the folders in which the lab writes; a user's text may lie beside them in ``paths.outputs`` or ``paths.data``."""
    outputs, data = Path(paths.outputs).expanduser(), Path(paths.data).expanduser()
    inside = [outputs / name for name in ("runs", "artefacts", "reports", "sweeps", "plans")]
    return (outputs, *inside, *(data / name for name in ("prepared", "packed", "raw")))


def duplicates_of(
    text: PreparedText, split: str, other: PreparedText, other_split: str, hides_own: bool = False
) -> Iterator[str]:
    """Yield a note if documents of a split are also in another split of the text, or in another text in its vocabulary.

    ``hides_own``: the other text is that of a datastore, which hides each document from itself if it is the same split.
    """
    corpus, others = text.corpus(), other.corpus()
    is_same = corpus.folder == others.folder
    exist = split in corpus.statistics["splits"] and other_split in others.statistics["splits"]
    if not exist or (is_same and split == other_split):
        return
    if hides_own and corpus.fingerprint(split) == others.fingerprint(other_split):
        return
    if found := find_duplicates(corpus.documents(split), others.documents(other_split)):
        where = other_split if is_same else f"{other_split} of {others.statistics['name']}"
        names = corpus.names(split), others.names(other_split)
        yield describe_duplicates(found, corpus.split(split).lengths, split, where, *names)


def learn_symbols(dataset: Dataset, tokenizer: BytePairs, settings: DictConfig) -> None:
    """Train a tokenizer on the training split of its dataset, under a progress bar; UserError where there is none."""
    if "train" not in dataset.splits():
        raise UserError(f"dataset {dataset.name} has no training split in {dataset.location}: its symbols are learned from one")
    with Progress(total=dataset.size("train"), unit="B", unit_scale=True, desc="learn train") as bar:
        read = (lines_with_progress(document, bar, TextCounts(), check=False) for document in dataset.documents("train"))
        tokenizer.train(chain.from_iterable(read), settings.max_size, settings.min_count)


def count_training_symbols(folder: Path) -> None:
    """Add the counts of the training split, if there is one, to a vocabulary that came without counts."""
    corpus = Corpus(folder)
    if "train" in corpus.statistics["splits"]:
        vocabulary, counts = corpus.vocabulary, np.zeros(len(corpus.vocabulary), np.int64)
        tokens = corpus.split("train").tokens
        for start in range(0, len(tokens), FLUSH):
            counts += np.bincount(tokens[start : start + FLUSH], minlength=len(counts))
        vocabulary.counts[:] = counts.tolist()
        vocabulary.save(folder / "vocabulary.json")


def log_statistics(folder: Path) -> None:
    """Log the statistics of the corpus in a folder."""
    log.info(format_statistics(json.loads((folder / "statistics.json").read_text())))


def format_statistics(statistics: dict[str, Any]) -> str:
    """Return a text of tokens per split, vocabulary size, mean document length (TRIME Table 8), and notes."""
    lines = [f"{statistics['name']}: vocabulary {statistics['vocabulary']:,}"]
    for name, split in statistics["splits"].items():
        share = 100 * split["unknown"] / split["tokens"]
        lines.append(
            f"  {name:<5} {split['tokens']:>13,} tokens {split['documents']:>9,} documents "
            f"of {split['mean_length']:,.1f} on average, {share:.2f} % <unk>"
        )
    return "\n".join([*lines, *(f"  note: {note}" for note in statistics["notes"])])
