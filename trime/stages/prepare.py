"""prepare: text to memory-mapped tokens, in a vocabulary of its own or a given one."""

from __future__ import annotations

import json
from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.data.corpus import Corpus, build_corpus, counted
from trime.data.datasets import Dataset
from trime.data.vocabulary import Vocabulary
from trime.stages.artefact import Artefact, plain

PLACES = ("path", "cache")  # where text lies does not decide what it is


class HasVocabulary(Artefact):
    """What decides the ids of a text: another corpus, or an imported model."""

    @abstractmethod
    def vocabulary(self) -> Vocabulary: ...


class Prepare(HasVocabulary):
    """The corpus of a dataset's configuration, in the vocabulary that ``given`` answers with, if any."""

    kind, stage = "prepare", "prepare"

    def __init__(self, config: DictConfig, own: DictConfig, given: HasVocabulary | None = None):
        super().__init__(config)
        self.own, self.given = own, given

    def root(self) -> Path:
        return Path(self.config.paths.data) / "prepared"

    @cached_property
    def dataset(self) -> Dataset:
        return instantiate(self.own, _convert_="all")

    def needs(self) -> list[Artefact]:
        return [self.given] if self.given else []

    def settings(self) -> Any:
        kept = {key: value for key, value in plain(self.own).items() if key not in PLACES}
        return {"dataset": kept, "content": self.dataset.fingerprint(), "vocabulary": plain(self.config.vocabulary)}

    def build(self, folder: Path) -> None:
        build_corpus(self.dataset, folder, self.given.vocabulary() if self.given else self.own_vocabulary())
        statistics = json.loads((folder / "statistics.json").read_text())
        statistics["fingerprint"] = self.dataset.fingerprint()
        (folder / "statistics.json").write_text(json.dumps(statistics, indent=1))
        print(table(statistics))

    def own_vocabulary(self) -> Vocabulary:
        """The symbols of the training split."""
        settings = self.config.vocabulary
        make = Vocabulary.as_published if settings.fairseq else Vocabulary.of_counts
        return make(counted(self.dataset), settings.limit, 1 if self.dataset.characters else settings.minimum)

    def vocabulary(self) -> Vocabulary:
        return self.corpus().vocabulary

    def corpus(self) -> Corpus:
        """The finished corpus."""
        return Corpus(self.path())


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
