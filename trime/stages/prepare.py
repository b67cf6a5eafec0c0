"""prepare: text to memory-mapped tokens."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.data.corpus import Corpus, build_corpus
from trime.data.datasets import Dataset
from trime.stages.artefact import Artefact, plain

PLACES = ("path", "cache")  # where text lies does not decide what it is


class Prepare(Artefact):
    """The corpus of a dataset's configuration, with the vocabulary of ``main`` where that is given."""

    kind, stage = "prepare", "prepare"

    def __init__(self, config: DictConfig, own: DictConfig, main: Prepare | None = None):
        super().__init__(config)
        self.own, self.main = own, main

    def root(self) -> Path:
        return Path(self.config.paths.data) / "prepared"

    @cached_property
    def dataset(self) -> Dataset:
        return instantiate(self.own, _convert_="all")

    def needs(self) -> list[Artefact]:
        return [self.main] if self.main else []

    def settings(self) -> Any:
        kept = {key: value for key, value in plain(self.own).items() if key not in PLACES}
        return {"dataset": kept, "content": self.dataset.fingerprint(), "vocabulary": plain(self.config.vocabulary)}

    def build(self, folder: Path) -> None:
        vocabulary = self.main.corpus().vocabulary if self.main else None
        build_corpus(self.dataset, folder, self.config.vocabulary.limit, self.config.vocabulary.minimum, vocabulary)
        statistics = json.loads((folder / "statistics.json").read_text())
        statistics["fingerprint"] = self.dataset.fingerprint()
        (folder / "statistics.json").write_text(json.dumps(statistics, indent=1))
        print(table(statistics))

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
