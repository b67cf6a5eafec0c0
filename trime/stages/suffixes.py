"""Artefact of stage datastore: the suffix array of a text, for n-grams of any length.

On disk it has 6 bytes per token of a text of at most 65,000 symbols.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from trime.data.segments import document_offsets
from trime.io import write_json
from trime.memory.ngrams import SuffixArray
from trime.metrics import ResourceUsage
from trime.pipeline.artefact import Artefact
from trime.stages.prepare import PreparedText

FILES = ("text", "order", "starts", "ends")


class Suffixes(Artefact):
    """A suffix array in ``order.npy`` and ``starts.npy``, and its text with a separator after each document."""

    kind, stage, format = "suffixes", "datastore", 2
    summary_file = "suffixes.json"

    def __init__(self, config: DictConfig, text: PreparedText, split: str, bounded: bool):
        super().__init__(config)
        self.text, self.split, self.bounded = text, split, bounded

    def needs(self) -> list[Artefact]:
        return [self.text]

    def settings(self) -> Any:
        return {"split": self.split, "bounded": self.bounded}

    def build(self, folder: Path) -> None:
        meter, corpus = ResourceUsage(), self.text.corpus()
        text = corpus.split(self.split)
        offsets = document_offsets(text, self.bounded)
        array = SuffixArray.build(text.tokens, len(corpus.vocabulary), offsets)
        for name, column in zip(FILES, (array.text, array.suffixes, array.starts, array.ends), strict=True):
            np.save(folder / f"{name}.npy", column)
        content = {"tokens": len(text.tokens), "text": corpus.fingerprint(self.split), "seconds": round(meter.seconds, 1)}
        write_json(folder / "suffixes.json", content)

    def array(self) -> SuffixArray:
        """Return the suffix array, with its text memory-mapped."""
        text, order, starts, ends = (np.load(self.path() / f"{name}.npy", mmap_mode="r") for name in FILES)
        return SuffixArray(text, order, np.array(starts), np.array(ends))
