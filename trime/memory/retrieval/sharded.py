"""The index over a datastore, in one part or in several that share what was learned (centroids, codes).

Every part visits the cells that one index would visit, so that in however many parts a store lies, the same entries are found.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from trime.memory.retrieval.datastore import Keys, Shards
from trime.memory.retrieval.faiss_index import FaissSearch, create_index, fill_faiss, train_faiss
from trime.memory.retrieval.ivf import IVFSearch, fill_ivf, train_ivf
from trime.memory.retrieval.search import ExactSearch, Search, check_training_size


class IndexPart(NamedTuple):
    """Entries ``first`` to ``last`` of a store's folder, and the folder of the index over them; no factory: none is needed."""

    store: Path
    first: int
    last: int
    folder: Path
    factory: str | None
    metric: str

    def absolute(self) -> IndexPart:
        """For a process with another working directory."""
        return self._replace(store=self.store.absolute(), folder=self.folder.absolute())

    @property
    def keys(self) -> Keys:
        """Its own."""
        return Keys(Shards(self.store), self.first, self.last)

    def fill(self, learned: Path, bar: Any) -> None:
        """Builds the index; a killed run goes on."""
        if not self.factory:
            bar.update(self.last - self.first)
            return
        self.folder.mkdir(exist_ok=True)
        if not ivf_cells(self.factory):
            fill_faiss(self.keys.blocks, self.metric, learned, self.folder / "index.faiss", bar)
        elif (self.folder / "cells.safetensors").exists():  # written last
            bar.update(self.last - self.first)
            for file in self.folder.glob("cell-*.npy"):
                file.unlink()
        else:
            fill_ivf(self.keys.blocks, self.metric, learned, self.folder, bar)

    def search(self, nprobe: int, device: str = "cpu") -> Search:
        """What answers from it."""
        if not self.factory:
            return ExactSearch(self.keys.blocks, self.metric)
        if ivf_cells(self.factory):
            return IVFSearch(self.folder, self.metric, nprobe)
        return FaissSearch(self.folder / "index.faiss", self.metric, nprobe, device)


def split_into_parts(store: Path, count: int, folder: Path, factory: str | None, metric: str) -> list[IndexPart]:
    """Parts of like size; a single one has its index in ``folder`` itself."""
    entries = len(Keys(Shards(store)))
    edges = [entries * number // count for number in range(count + 1)]
    places = [folder] if count == 1 else [folder / f"part-{number:05d}" for number in range(count)]
    ends = zip(edges[:-1], edges[1:], places, strict=True)
    return [IndexPart(store, first, last, place, factory, metric) for first, last, place in ends]


def train_shared(store: Path, factory: str, metric: str, folder: Path) -> Path:
    """What all parts share, learned on a sample of the whole store; the file that holds it."""
    keys, cells = Keys(Shards(store)), ivf_cells(factory)
    file = folder / ("learned.npy" if cells else "learned.faiss")
    if cells:
        train_ivf(keys.blocks, len(keys), keys.width, cells, metric, file)
    else:
        train_faiss(keys.blocks, len(keys), keys.width, factory, metric, file)
    return file


def build_parts(parts: list[IndexPart], folder: Path, bar: Any) -> None:
    """All of them, one after another, in ``folder``, where what was learned stays; a killed run goes on."""
    first = parts[0]
    learned = train_shared(first.store, first.factory, first.metric, folder) if first.factory else folder
    for part in parts:
        part.fill(learned, bar)


def check_factory(factory: str, entries: int, width: int, metric: str) -> None:
    """UserError where an index of so many keys could not be trained."""
    if cells := ivf_cells(factory):
        check_training_size(factory, cells, entries)
    else:
        create_index(entries, width, factory, metric)


def ivf_cells(factory: str) -> int:
    """How many cells ``Cells…`` names; 0: it is FAISS's."""
    named = re.fullmatch(r"Cells(\d+)", factory)
    return int(named[1]) if named else 0
