"""pack: the BM25 neighbours of every training segment (TRIME Algorithm 1's SimSeg), cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.data.corpus import Split
from trime.data.neighbours import TermTable, english, excluded_ranges, segment_terms
from trime.data.segments import Segments
from trime.errors import UserError
from trime.io import write_array
from trime.pipeline.artefact import Artefact
from trime.pipeline.engines import Advance
from trime.pipeline.parts import ArtefactInParts, Parts, RunParts
from trime.progress import Progress
from trime.stages.prepare import PreparedText

QUERIES = 2048  # per file of results


class Pack(ArtefactInParts):
    """The nearest neighbours of training segments: ``neighbours.npy`` [segments k]."""

    kind, depends_on = "pack", ("segments", "batching.k", "neighbours")

    def __init__(self, config: DictConfig, corpus: PreparedText, segments: Callable[[Split], Segments], run_parts: RunParts):
        """``segments`` cuts the training split into the segments that are compared."""
        super().__init__(config)
        self.corpus, self.segments, self.run_parts = corpus, segments, run_parts

    def root(self) -> Path:
        """Return ``paths.data/packed``, which experiments share."""
        return Path(self.config.paths.data).expanduser() / "packed"

    def needs(self) -> list[Artefact]:
        return [self.corpus]

    def open_parts(self, folder: Path) -> PackParts:
        return PackParts(self, folder)

    def build(self, folder: Path) -> None:
        parts = self.open_parts(folder)
        with Progress(total=sum(parts.sizes), unit="segment", desc="pack") as bar:
            self.run_parts(self, parts, bar)
        neighbours = np.concatenate([np.load(file) for file in parts.files()])
        if not (neighbours >= 0).any() and self.config.neighbours.exclude != "none":
            raise UserError(
                f"neighbours.exclude={self.config.neighbours.exclude} leaves none of {len(neighbours):,} segments a neighbour: "
                "set neighbours.exclude=none, or use more text"
            )
        np.save(folder / "neighbours.npy", neighbours)

    def neighbours(self) -> np.ndarray:
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
        backend = instantiate(self.pack.config.neighbours, _convert_="all")
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
        write_array(self.file(number), self.backend.nearest(queries, self.pack.config.batching.k, *excluded))
        advance(len(queries))
