"""prepare: text to memory-mapped tokens, in a vocabulary of its own or a given one."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.data.corpus import FLUSH, Corpus, VocabularySource, build_corpus, count_symbols
from trime.data.datasets import Dataset
from trime.data.vocabulary import Vocabulary
from trime.io import plain
from trime.pipeline.artefact import Artefact
from trime.types import UserError

PLACES = ("path", "cache")  # where text lies does not decide what it is


class Prepare(Artefact):
    """The corpus of a dataset's configuration, in a given vocabulary or its own."""

    kind, stage = "prepare", "prepare"

    def __init__(self, config: DictConfig, own: DictConfig, given: VocabularySource | None = None):
        super().__init__(config)
        self.own, self.given = own, given

    def root(self) -> Path:
        return Path(self.config.paths.data) / "prepared"

    @cached_property
    def dataset(self) -> Dataset:
        found = instantiate(self.own, _convert_="all")
        if not isinstance(found, Dataset):
            raise UserError(f"{type(found).__name__} is parallel text, for experiment=mt_vanilla, knn_mt or trime_mt")
        if self.given and self.given.tokenizer:
            found.tokenizer, found.characters = self.given.tokenizer, False
        return found

    def settings(self) -> Any:
        kept = {key: value for key, value in plain(self.own).items() if key not in PLACES}
        vocabulary = self.given.name if self.given else plain(self.config.vocabulary)
        return {"dataset": kept, "content": self.dataset.fingerprint(), "vocabulary": vocabulary}

    def build(self, folder: Path) -> None:
        build_corpus(self.dataset, folder, self.given.vocabulary() if self.given else self.own_vocabulary())
        if self.given and self.given.tokenizer:
            count_training_symbols(folder)
        self.tell(folder)

    def tell(self, folder: Path) -> None:
        """Names the text's content in its statistics, and prints them."""
        statistics = json.loads((folder / "statistics.json").read_text())
        statistics["fingerprint"] = self.dataset.fingerprint()
        (folder / "statistics.json").write_text(json.dumps(statistics, indent=1))
        print(table(statistics))

    def own_vocabulary(self) -> Vocabulary:
        """The symbols of the training split."""
        settings = self.config.vocabulary
        make = Vocabulary.fairseq_from_counts if settings.fairseq else Vocabulary.from_counts
        return make(count_symbols(self.dataset), settings.limit, 1 if self.dataset.characters else settings.minimum)

    def source(self) -> VocabularySource:
        """This corpus's vocabulary, for other texts."""
        tokenizer = self.given.tokenizer if self.given else None
        return VocabularySource(self.fingerprint, lambda: self.corpus().vocabulary, tokenizer)

    def corpus(self) -> Corpus:
        """The finished corpus."""
        return Corpus(self.path())


def count_training_symbols(folder: Path) -> None:
    """Gives a vocabulary that came without counts those of the training split, where there is one."""
    corpus = Corpus(folder)
    if "train" in corpus.statistics["splits"]:
        vocabulary, counts = corpus.vocabulary, np.zeros(len(corpus.vocabulary), np.int64)
        tokens = corpus.split("train").tokens
        for start in range(0, len(tokens), FLUSH):
            counts += np.bincount(tokens[start : start + FLUSH], minlength=len(counts))
        vocabulary.counts[:] = counts.tolist()
        vocabulary.save(folder / "vocabulary.json")


def table(statistics: dict[str, Any]) -> str:
    """Tokens per split, vocabulary, mean document length (TRIME Table 8), and notes."""
    lines = [f"{statistics['name']}: vocabulary {statistics['vocabulary']:,}"]
    for name, split in statistics["splits"].items():
        share = 100 * split["unknown"] / split["tokens"]
        lines.append(
            f"  {name:<5} {split['tokens']:>13,} tokens {split['documents']:>9,} documents "
            f"of {split['mean_length']:,.1f} on average, {share:.2f} % <unk>"
        )
    return "\n".join([*lines, *(f"  note: {note}" for note in statistics["notes"])])
