"""Artefact of stage datastore: the suffix array of a text, for n-grams of any length.

On disk it has 6 bytes per token of a text of at most 65,000 symbols.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trime.common.identity import Free
from trime.common.io import write_json
from trime.common.metrics import ResourceUsage
from trime.data.segments import document_offsets
from trime.lab.artefact import Artefact, Lab
from trime.memory.inference.ngrams import SuffixArray
from trime.stages.prepare import PreparedText

FILES = ("text", "order", "starts", "ends")


@dataclass(frozen=True, eq=False, repr=False)
class Suffixes(Artefact):
    """A suffix array in ``order.npy`` and ``starts.npy``, and its text with a separator after each document."""

    kind, stage, format, summary_file = "suffixes", "datastore", 2, "suffixes.json"

    text: PreparedText
    split: str
    bounded: bool  # documents are separate; else the text is one stream
    lab: Free[Lab]

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
