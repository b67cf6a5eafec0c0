"""pack: the BM25 neighbours of every training segment (TRIME Algorithm 1's SimSeg), cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.data.analyzers import TermTable, english
from trime.data.corpus import Split
from trime.data.neighbours import excluded_ranges, segment_terms
from trime.data.segments import Segments
from trime.errors import UserError
from trime.io import write_array
from trime.pipeline.artefact import Artefact
from trime.progress import Progress
from trime.stages.prepare import PreparedText

QUERIES = 2048  # per file of results


class Pack(Artefact):
    """The nearest neighbours of training segments: ``neighbours.npy`` [segments k]."""

    kind, depends_on = "pack", ("segments", "batching.k", "neighbours")

    def __init__(self, config: DictConfig, corpus: PreparedText, segments: Callable[[Split], Segments]):
        """``segments`` cuts the training split into the segments that are compared."""
        super().__init__(config)
        self.corpus, self.segments = corpus, segments

    def root(self) -> Path:
        """Return ``paths.data/packed``, which experiments share."""
        return Path(self.config.paths.data) / "packed"

    def needs(self) -> list[Artefact]:
        return [self.corpus]

    def build(self, folder: Path) -> None:
        corpus = self.corpus.corpus()
        text = corpus.split("train")
        segments = self.segments(text)
        special = [corpus.vocabulary.eos, corpus.vocabulary.unknown]
        parts = [folder / f"part-{start:09d}.npy" for start in range(0, len(segments), QUERIES)]
        if not all(part.exists() for part in parts):
            backend = instantiate(self.config.neighbours, _convert_="all")
            terms = segment_terms(text, segments, special)
            if backend.analyzer == "english":
                if corpus.statistics["characters"]:
                    raise UserError(
                        "neighbours.analyzer=english needs words, but these tokens are characters: set neighbours.analyzer=raw"
                    )
                table = TermTable(corpus.vocabulary.symbols, english)
                terms = [table(tokens) for tokens in terms]
            backend.fit(terms)
            self.search(backend, parts, segments)
        neighbours = np.concatenate([np.load(part) for part in parts])
        if not (neighbours >= 0).any() and self.config.neighbours.exclude != "none":
            raise UserError(
                f"neighbours.exclude={self.config.neighbours.exclude} leaves none of {len(neighbours):,} segments a neighbour: "
                "set neighbours.exclude=none, or use more text"
            )
        np.save(folder / "neighbours.npy", neighbours)
        for part in parts:
            part.unlink()

    def search(self, backend: Any, parts: list[Path], segments: Segments) -> None:
        """Answer the queries whose results no file holds yet."""
        total = len(segments)
        with Progress(total=total, unit="segment", desc="pack") as bar:
            for number, part in enumerate(parts):
                queries = list(range(number * QUERIES, min((number + 1) * QUERIES, total)))
                if not part.exists():
                    excluded = excluded_ranges(queries, segments.document, backend.exclude)
                    write_array(part, backend.nearest(queries, self.config.batching.k, *excluded))
                bar.update(len(queries))

    def neighbours(self) -> np.ndarray:
        """Return the finished table [segments k], memory-mapped; -1 where there is no neighbour."""
        return np.load(self.path() / "neighbours.npy", mmap_mode="r")
