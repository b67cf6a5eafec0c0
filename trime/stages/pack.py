"""pack: the BM25 neighbours of every training segment (TRIME Algorithm 1's SimSeg), cached on disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trime.common.identity import Free
from trime.common.io import write_array
from trime.common.parts import build
from trime.data.corpus import Split
from trime.data.neighbours import TermTable, english, excluded_ranges, segment_terms
from trime.data.segments import Segments, training_segments
from trime.errors import UserError
from trime.lab.artefact import Lab
from trime.lab.engines import Advance
from trime.lab.parts import ArtefactInParts, Parts
from trime.lab.stage import Stage
from trime.stages.prepare import Prepare

QUERIES = 2048  # per file of results


@dataclass(frozen=True, eq=False, repr=False)
class Pack(ArtefactInParts):
    """The nearest neighbours of training segments: ``neighbours.npy`` [segments k]."""

    kind = "pack"

    corpus: Prepare
    length: int  # tokens of the segments that are compared
    bounded: bool  # a segment ends with its document
    k: int  # neighbours of a segment
    neighbours: dict[str, Any]  # conf/neighbours: how they are found
    lab: Free[Lab]

    def root(self) -> Path:
        """Return ``paths.data/packed``, which experiments share."""
        return self.lab.data / "packed"

    def segments(self, text: Split) -> Segments:
        """Return the segments that are compared."""
        return training_segments(text, self.length, self.bounded)

    def open_parts(self, folder: Path) -> PackParts:
        return PackParts(self, folder)

    def build(self, folder: Path) -> None:
        parts = self.open_parts(folder)
        self.make_parts(parts, "pack", "segment")
        neighbours = np.concatenate([np.load(file) for file in parts.files()])
        exclude = self.neighbours["exclude"]
        if not (neighbours >= 0).any() and exclude != "none":
            raise UserError(
                f"neighbours.exclude={exclude} leaves none of {len(neighbours):,} segments a neighbour: "
                "set neighbours.exclude=none, or use more text"
            )
        np.save(folder / "neighbours.npy", neighbours)

    def table(self) -> np.ndarray:
        """Return the finished table [segments k], memory-mapped; -1 where there is no neighbour."""
        return np.load(self.path() / "neighbours.npy", mmap_mode="r")


class PackParts(Parts):
    """Parts of the training segments: the neighbours of each among all segments, which every process indexes for itself."""

    def __init__(self, pack: Pack, folder: Path):
        self.pack, self.folder, self.corpus = pack, folder, pack.corpus.corpus()
        self.text = self.corpus.split("train")
        self.segments = pack.segments(self.text)
        self.sizes = [min(QUERIES, len(self.segments) - start) for start in range(0, len(self.segments), QUERIES)]

    def file(self, number: int) -> Path:
        return self.folder / f"part-{number * QUERIES:09d}-{self.sizes[number]}.npy"

    @cached_property
    def backend(self) -> Any:
        """The index of all segments; UserError if their tokens are not what its analyzer reads."""
        backend = build(self.pack.neighbours)
        terms = segment_terms(self.text, self.segments, [self.corpus.vocabulary.eos, self.corpus.vocabulary.unknown])
        if backend.analyzer == "english":
            if self.corpus.statistics["characters"]:
                raise UserError(
                    "neighbours.analyzer=english needs words, but these tokens are characters: set neighbours.analyzer=raw"
                )
            table = TermTable(self.corpus.vocabulary.symbols, english)
            terms = [table(tokens) for tokens in terms]
        backend.fit(terms)
        return backend

    def make(self, number: int, advance: Advance) -> None:
        queries = list(range(number * QUERIES, number * QUERIES + self.sizes[number]))
        excluded = excluded_ranges(queries, self.segments.document, self.backend.exclude)
        write_array(self.file(number), self.backend.nearest(queries, self.pack.k, *excluded))
        advance(len(queries))


PACK = Stage("pack", lambda graph: [graph.pack])
