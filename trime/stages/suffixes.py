"""Artefact of stage datastore: the suffix array of a text, for n-grams of any length (5 bytes per token on disk)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from trime.io import write_json
from trime.memory.ngrams import SuffixArray
from trime.metrics import ResourceUsage
from trime.pipeline.artefact import Artefact
from trime.stages.prepare import PreparedText


class Suffixes(Artefact):
    """A suffix array in ``order.npy`` and ``starts.npy``; the prepared text itself is not copied."""

    kind, stage = "suffixes", "datastore"
    summary_file = "suffixes.json"

    def __init__(self, config: DictConfig, text: PreparedText, split: str):
        super().__init__(config)
        self.text, self.split = text, split

    def needs(self) -> list[Artefact]:
        return [self.text]

    def settings(self) -> Any:
        return {"split": self.split}

    def build(self, folder: Path) -> None:
        meter, corpus = ResourceUsage(), self.text.corpus()
        tokens = corpus.split(self.split).tokens
        array = SuffixArray.build(tokens, len(corpus.vocabulary))
        np.save(folder / "order.npy", array.suffixes)
        np.save(folder / "starts.npy", array.starts)
        content = {"tokens": len(tokens), "text": corpus.fingerprint(self.split), "seconds": round(meter.seconds, 1)}
        write_json(folder / "suffixes.json", content)

    def array(self) -> SuffixArray:
        """Return the suffix array, memory-mapped."""
        order, starts = (np.load(self.path() / f"{name}.npy", mmap_mode="r") for name in ("order", "starts"))
        return SuffixArray(self.text.corpus().split(self.split).tokens, order, np.array(starts))
