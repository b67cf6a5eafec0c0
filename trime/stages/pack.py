"""pack: the BM25 neighbours of every training segment (TRIME Algorithm 1's SimSeg), cached on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from trime.data.analyzers import TermTable, english
from trime.data.corpus import Split
from trime.data.module import terms_of
from trime.data.neighbours import excluded_ranges
from trime.data.segments import Segments, check_length, cut, document_offsets
from trime.io import plain
from trime.pipeline.artefact import Artefact
from trime.stages.prepare import Prepare
from trime.types import UserError

QUERIES = 2048  # a file


def training_segments(config: DictConfig, text: Split) -> Segments:
    """The training split's segments."""
    offsets = document_offsets(text, config.segments.bounded)
    check_length(offsets, config.segments.length, "training")
    return cut(offsets, config.segments.length)


class Pack(Artefact):
    """``neighbours.npy`` [segments k]."""

    kind, stage = "pack", "pack"

    def __init__(self, config: DictConfig, corpus: Prepare):
        super().__init__(config)
        self.corpus = corpus

    def root(self) -> Path:
        return Path(self.config.paths.data) / "packed"

    def needs(self) -> list[Artefact]:
        return [self.corpus]

    def settings(self) -> Any:
        return {
            "segments": plain(self.config.segments),
            "k": self.config.batching.k,
            "backend": plain(self.config.neighbours),
        }

    def segments(self, text: Split) -> Segments:
        """What is compared."""
        return training_segments(self.config, text)

    def build(self, folder: Path) -> None:
        corpus = self.corpus.corpus()
        text = corpus.split("train")
        segments = self.segments(text)
        special = [corpus.vocabulary.eos, corpus.vocabulary.unknown]
        parts = [folder / f"part-{start:09d}.npy" for start in range(0, len(segments), QUERIES)]
        if not all(part.exists() for part in parts):
            backend = instantiate(self.config.neighbours, _convert_="all")
            terms = terms_of(text, segments, special)
            if backend.analyzer == "english":
                if corpus.statistics["characters"]:
                    raise UserError("neighbours.analyzer=english reads words, and these tokens are characters: set raw")
                table = TermTable(corpus.vocabulary.symbols, english)
                terms = [table(tokens) for tokens in terms]
            backend.fit(terms)
            self.search(backend, parts, segments)
        found = np.concatenate([np.load(part) for part in parts])
        if not (found >= 0).any() and self.config.neighbours.exclude != "none":
            raise UserError(
                f"neighbours.exclude={self.config.neighbours.exclude} leaves no segment of {len(found):,} a neighbour: "
                "set none, or give it more text"
            )
        np.save(folder / "neighbours.npy", found)
        for part in parts:
            part.unlink()

    def search(self, backend: Any, parts: list[Path], segments: Segments) -> None:
        """Answers the queries that no file holds yet."""
        total = len(segments)
        with tqdm(total=total, unit="segment", desc="pack", mininterval=1) as bar:
            for number, part in enumerate(parts):
                queries = list(range(number * QUERIES, min((number + 1) * QUERIES, total)))
                if not part.exists():
                    aside = part.with_suffix(".aside.npy")
                    left_out = excluded_ranges(queries, segments.document, backend.exclude)
                    np.save(aside, backend.nearest(queries, self.config.batching.k, *left_out))
                    aside.replace(part)
                bar.update(len(queries))

    def neighbours(self) -> np.ndarray:
        """The finished table."""
        return np.load(self.path() / "neighbours.npy", mmap_mode="r")
