"""The index over a datastore, whose search may be divided into parts, for several workers.

Keys sorted by cell are a single index, and a part is some of its cells. Other indexes are built for each part's keys, and share
what was trained (centroids, codes). Every part searches the cells that a single index would search, so that any number of parts
finds the same entries.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trime.memory.retrieval.builders import IVFBuilder, builder_of
from trime.memory.retrieval.datastore import Keys, Shards
from trime.memory.retrieval.ivf import Cells, IVFSearch
from trime.memory.retrieval.search import ExactSearch, Search

HEADER = 4096  # bytes of a .npy file that hold its header
BLOCK = 2**26  # bytes of keys that are copied at once


class IndexPart(NamedTuple):
    """Entries ``first`` to ``last`` of a store's folder, and the folder of their index; without a factory there is none."""

    store: Path
    first: int
    last: int
    folder: Path
    factory: str | None
    metric: str

    def with_folders(self, change: Callable[[Path], Path]) -> IndexPart:
        """Return the part with ``change`` of each of its folders in place of the folder."""
        return self._replace(store=change(self.store), folder=change(self.folder))

    @property
    def folders(self) -> list[Path]:
        """The folders that a search reads."""
        return [self.store, *[self.folder] * bool(self.factory)]

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
        builder_of(self.factory).fill(self.keys, self.metric, trained, self.folder, bar)

    def search(self, nprobe: int, device: str = "cpu") -> Search:
        """Open the search over this part."""
        if not self.factory:
            return ExactSearch(self.keys.blocks, self.metric)
        return builder_of(self.factory).open(self.folder, self.metric, nprobe, device)


class CellsPart(NamedTuple):
    """The cells from ``first`` to before ``last`` of an index in ``folder``."""

    folder: Path
    first: int
    last: int
    metric: str

    def with_folders(self, change: Callable[[Path], Path]) -> CellsPart:
        """Return the part with ``change`` of its folder in place of the folder."""
        return self._replace(folder=change(self.folder))

    @property
    def folders(self) -> list[Path]:
        """The folders that a search reads."""
        return [self.folder]

    def search(self, nprobe: int, device: str = "cpu") -> IVFSearch:
        """Open the search over this part."""
        return IVFSearch(self.folder, self.metric, nprobe, (self.first, self.last))


def split_cells(folder: Path, count: int, metric: str) -> list[CellsPart]:
    """Return ``count`` parts of an index by cells, each with about as many entries; there may be fewer than ``count`` cells."""
    start = Cells(folder, metric, 1).start
    wanted = [start[-1] * number // count for number in range(count + 1)]
    edges = np.unique(np.searchsorted(start, wanted)).tolist()
    return [CellsPart(folder, first, last, metric) for first, last in pairwise(edges)]


def split_into_parts(store: Path, count: int, folder: Path, factory: str | None, metric: str) -> list[IndexPart]:
    """Return ``count`` parts of equal size; a single part has its index in ``folder`` itself."""
    entries = len(Keys(Shards(store)))
    edges = [entries * number // count for number in range(count + 1)]
    folders = [folder] if count == 1 else [folder / f"part-{number:05d}" for number in range(count)]
    ends = zip(edges[:-1], edges[1:], folders, strict=True)
    return [IndexPart(store, first, last, part, factory, metric) for first, last, part in ends]


def train_shared(store: Path, factory: str, metric: str, folder: Path) -> Path:
    """Train what all parts share on a sample of the whole store; return its file."""
    return builder_of(factory).train(Keys(Shards(store)), metric, folder)


def build_parts(parts: list[IndexPart], folder: Path, bar: Any) -> None:
    """Build all parts, one after another; ``folder`` keeps what was trained, so that a killed run resumes."""
    first = parts[0]
    trained = train_shared(first.store, first.factory, first.metric, folder) if first.factory else folder
    for part in parts:
        part.fill(trained, bar)


def assigned_shards(store: Path) -> list[Keys]:
    """Return the keys of each shard of a store, whose cells can be found apart."""
    shards = Shards(store)
    return [Keys(shards, first, last) for first, last in pairwise(Keys(shards).starts.tolist())]


def divides_by_cells(factory: str | None) -> bool:
    """Return whether the search of an index is divided by the cells of a single one."""
    return factory is not None and isinstance(builder_of(factory), IVFBuilder)


def check_factory(factory: str, entries: int, width: int, metric: str) -> None:
    """Raise a UserError if an index cannot be trained on so many keys."""
    builder_of(factory).check(entries, width, metric)
