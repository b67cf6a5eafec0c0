"""pack: the BM25 neighbours of every training segment (TRIME Algorithm 1's SimSeg), cached on disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from trime.common.components import build
from trime.common.identity import Free
from trime.common.io import write_array
from trime.data.corpus import Corpus, Split
from trime.data.neighbours import TermTable, english, excluded_ranges, segment_terms
from trime.data.segments import Segments, training_segments
from trime.errors import UserError
from trime.lab.artefact import Lab
from trime.lab.engines import Advance
from trime.lab.shards import ShardedArtefact, Work
from trime.lab.stage import Stage
from trime.stages.prepare import Prepare

QUERIES = 2048  # per file of results


@dataclass(frozen=True, eq=False, repr=False)
class Pack(ShardedArtefact):
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

    def work(self, folder: Path) -> Work:
        """Return the work on the neighbours of each segment among all segments, which every process indexes for itself."""
        corpus = self.corpus.corpus()
        text = corpus.split("train")
        segments = self.segments(text)
        sizes = [min(QUERIES, len(segments) - start) for start in range(0, len(segments), QUERIES)]
        files = [folder / f"part-{number * QUERIES:09d}-{size}.npy" for number, size in enumerate(sizes)]
        index = cache(partial(self.index, corpus, text, segments))

        def make(number: int, advance: Advance) -> None:
            queries = list(range(number * QUERIES, number * QUERIES + sizes[number]))
            excluded = excluded_ranges(queries, segments.document, index().exclude)
            write_array(files[number], index().nearest(queries, self.k, *excluded))
            advance(len(queries))

        return Work(files, sizes, make)

    def index(self, corpus: Corpus, text: Split, segments: Segments) -> Any:
        """Return the index of all segments; UserError if its analyzer cannot read their tokens."""
        index = build(self.neighbours)
        terms = segment_terms(text, segments, [corpus.vocabulary.eos, corpus.vocabulary.unknown])
        if index.analyzer == "english":
            if corpus.statistics["characters"]:
                raise UserError(
                    "neighbours.analyzer=english needs words, but these tokens are characters: set neighbours.analyzer=raw"
                )
            table = TermTable(corpus.vocabulary.symbols, english)
            terms = [table(tokens) for tokens in terms]
        index.fit(terms)
        return index

    def build(self, folder: Path) -> None:
        work = self.work(folder)
        self.make_shards(work, folder, "pack", "segment")
        neighbours = np.concatenate([np.load(file) for file in work.files])
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


PACK = Stage("pack", lambda graph: [graph.pack])
