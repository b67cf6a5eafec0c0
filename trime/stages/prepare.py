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
    """The corpus of ``section``'s dataset; all but the main one are encoded with the main one's vocabulary."""

    kind, stage = "prepare", "prepare"

    def __init__(self, config: DictConfig, section: str | None = None):
        super().__init__(config)
        self.section = section
        self.own = config[section].get("dataset") if section else config.dataset

    def root(self) -> Path:
        return Path(self.config.paths.data) / "prepared"

    @cached_property
    def dataset(self) -> Dataset:
        return instantiate(self.own)

    def needs(self) -> list[Artefact]:
        return [Prepare(self.config)] if self.section else []

    def settings(self) -> Any:
        kept = {key: value for key, value in plain(self.own).items() if key not in PLACES}
        return {"dataset": kept, "content": self.dataset.fingerprint(), "vocabulary": plain(self.config.vocabulary)}

    def build(self, folder: Path) -> None:
        vocabulary = self.needs()[0].corpus().vocabulary if self.section else None  # type: ignore[attr-defined]
        build_corpus(self.dataset, folder, self.config.vocabulary.limit, self.config.vocabulary.minimum, vocabulary)
        statistics = json.loads((folder / "statistics.json").read_text())
        statistics["fingerprint"] = self.dataset.fingerprint()
        (folder / "statistics.json").write_text(json.dumps(statistics, indent=1))
        print(table(statistics))

    def corpus(self) -> Corpus:
        """The finished corpus."""
        return Corpus(self.path())


def prepared(config: DictConfig, section: str | None) -> Prepare:
    """The corpus a section reads: its own dataset's, or the main one."""
    return Prepare(config, section if section and config[section].get("dataset") else None)


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
