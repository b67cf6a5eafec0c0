"""The index over a datastore, in one or several parts that share what was trained (centroids, codes).

Every part searches the cells that a single index would search, so that any number of parts finds the same entries.
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
    """Entries ``first`` to ``last`` of a store's folder, and the folder of their index; without a factory there is none."""

    store: Path
    first: int
    last: int
    folder: Path
    factory: str | None
    metric: str

    def absolute(self) -> IndexPart:
        """Return the part with absolute paths, for processes with another working directory."""
        return self._replace(store=self.store.absolute(), folder=self.folder.absolute())

    @property
    def keys(self) -> Keys:
        """Return the keys of this part."""
        return Keys(Shards(self.store), self.first, self.last)

    def fill(self, trained: Path, bar: Any) -> None:
        """Build the index; a killed run resumes."""
        if not self.factory:
            bar.update(self.last - self.first)
            return
        self.folder.mkdir(exist_ok=True)
        if not ivf_cells(self.factory):
            fill_faiss(self.keys.blocks, self.metric, trained, self.folder / "index.faiss", bar)
        elif (self.folder / "cells.safetensors").exists():  # written last
            bar.update(self.last - self.first)
            for file in self.folder.glob("cell-*.npy"):
                file.unlink()
        else:
            fill_ivf(self.keys.blocks, self.metric, trained, self.folder, bar)

    def search(self, nprobe: int, device: str = "cpu") -> Search:
        """Open the search over this part."""
        if not self.factory:
            return ExactSearch(self.keys.blocks, self.metric)
        if ivf_cells(self.factory):
            return IVFSearch(self.folder, self.metric, nprobe)
        return FaissSearch(self.folder / "index.faiss", self.metric, nprobe, device)


def split_into_parts(store: Path, count: int, folder: Path, factory: str | None, metric: str) -> list[IndexPart]:
    """Return ``count`` parts of equal size; a single part has its index in ``folder`` itself."""
    entries = len(Keys(Shards(store)))
    edges = [entries * number // count for number in range(count + 1)]
    places = [folder] if count == 1 else [folder / f"part-{number:05d}" for number in range(count)]
    ends = zip(edges[:-1], edges[1:], places, strict=True)
    return [IndexPart(store, first, last, place, factory, metric) for first, last, place in ends]


def train_shared(store: Path, factory: str, metric: str, folder: Path) -> Path:
    """Train what all parts share on a sample of the whole store; return its file."""
    keys, cells = Keys(Shards(store)), ivf_cells(factory)
    file = folder / ("learned.npy" if cells else "learned.faiss")
    if cells:
        train_ivf(keys.blocks, len(keys), keys.width, cells, metric, file)
    else:
        train_faiss(keys.blocks, len(keys), keys.width, factory, metric, file)
    return file


def build_parts(parts: list[IndexPart], folder: Path, bar: Any) -> None:
    """Build all parts, one after another; ``folder`` keeps what was trained, so that a killed run resumes."""
    first = parts[0]
    trained = train_shared(first.store, first.factory, first.metric, folder) if first.factory else folder
    for part in parts:
        part.fill(trained, bar)


def check_factory(factory: str, entries: int, width: int, metric: str) -> None:
    """Raise a UserError if an index cannot be trained on so many keys."""
    if cells := ivf_cells(factory):
        check_training_size(factory, cells, entries)
    else:
        create_index(entries, width, factory, metric)


def ivf_cells(factory: str) -> int:
    """Return the number of cells in a factory string ``Cells…``; 0 for those of FAISS."""
    match = re.fullmatch(r"Cells(\d+)", factory)
    return int(match[1]) if match else 0
