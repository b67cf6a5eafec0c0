"""The index over a datastore, whose search may be divided into parts, for several workers.

Keys sorted by cell are a single index, and a part is some of its cells. Other indexes are built for each part's keys, and share
what was trained (centroids, codes). Every part searches the cells that a single index would search, so that any number of parts
finds the same entries.
"""

from __future__ import annotations

import math
import os
import pkgutil
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from trime.errors import UserError
from trime.memory.retrieval.datastore import Keys, Shards
from trime.memory.retrieval.faiss_index import FaissSearch, create_index, fill_faiss, train_faiss
from trime.memory.retrieval.ivf import CELLS, CENTROIDS, Cells, IVFSearch, fill_ivf, train_ivf
from trime.memory.retrieval.search import MIN_POINTS_PER_CELL, ExactSearch, Search, check_training_size

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


@runtime_checkable
class IndexBuilder(Protocol):
    """A kind of index over keys, which ``index.factory`` names."""

    def check(self, entries: int, width: int, metric: str) -> None:
        """Raise a UserError if so many keys of this width cannot be indexed."""
        ...

    def train(self, keys: Keys, metric: str, folder: Path) -> Path:
        """Write what all parts share to a file ``learned.…`` of the folder, unless it is there; return its path."""
        ...

    def fill(self, keys: Keys, metric: str, trained: Path, folder: Path, bar: Any) -> None:
        """Index a part's keys in its folder, and advance the progress bar by their number; a killed run resumes."""
        ...

    def open(self, folder: Path, metric: str, nprobe: int, device: str) -> Search:
        """Return the search over a filled part; a larger ``nprobe`` (index.nprobe) compares more keys."""
        ...


class IVFBuilder:
    """Keys sorted by cell (``Cells…``)."""

    def __init__(self, cells: int):
        self.cells = cells

    def check(self, entries: int, width: int, metric: str) -> None:
        check_training_size(f"Cells{self.cells}", self.cells, entries)

    def train(self, keys: Keys, metric: str, folder: Path) -> Path:
        file = folder / CENTROIDS
        train_ivf(keys.blocks, len(keys), keys.width, self.cells, metric, file)
        return file

    def fill(self, keys: Keys, metric: str, trained: Path, folder: Path, bar: Any) -> None:
        if (folder / CELLS).exists():  # written last
            bar.update(len(keys))
            for file in folder.glob("part-*.npy"):
                file.unlink()
        else:
            fill_ivf(keys.blocks, metric, trained, folder, bar)

    def open(self, folder: Path, metric: str, nprobe: int, device: str) -> Search:
        return IVFSearch(folder, metric, nprobe)


class FaissBuilder:
    """A FAISS index, by its factory string."""

    def __init__(self, factory: str):
        self.factory = factory

    def check(self, entries: int, width: int, metric: str) -> None:
        create_index(entries, width, self.factory, metric)

    def train(self, keys: Keys, metric: str, folder: Path) -> Path:
        file = folder / "learned.faiss"
        train_faiss(keys.blocks, len(keys), keys.width, self.factory, metric, file)
        return file

    def fill(self, keys: Keys, metric: str, trained: Path, folder: Path, bar: Any) -> None:
        fill_faiss(keys.blocks, metric, trained, folder / "index.faiss", bar)

    def open(self, folder: Path, metric: str, nprobe: int, device: str) -> Search:
        return FaissSearch(folder / "index.faiss", metric, nprobe, device)


def builder_of(factory: str) -> IndexBuilder:
    """Return the builder that a factory string names: cells, a class by its dotted name, else an index of FAISS.

    UserError if there is no such class.
    """
    if match := re.fullmatch(r"Cells(\d+)", factory):
        return IVFBuilder(int(match[1]))
    if "." not in factory:
        return FaissBuilder(factory)
    try:
        return pkgutil.resolve_name(factory)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"index.factory={factory} does not name a class without arguments ({error})") from None


AUTO = "auto"  # index.factory: chosen by the number of keys
EXACT_UP_TO = 2**17  # keys that index=auto searches exactly: about ten milliseconds per 100 queries


def choose_factory(entries: int, width: int, parts: int = 1) -> str | None:
    """Return the factory of index=auto: exact if that is fast, cells if a part's keys fit in half the memory, else PQ codes."""
    if entries <= EXACT_UP_TO:
        return None
    return complete_factory("Cells" if 2 * width * entries / parts <= machine_memory() / 2 else "IVF_PQ", entries, width)


def complete_factory(factory: str | None, entries: int, width: int) -> str | None:
    """Fill in the numbers that a factory string leaves out: about √n cells, half of the dimensions, at most 64 codes."""
    if factory is None:
        return None
    cells = max(1, min(2 ** round(math.log2(math.sqrt(entries))), entries // MIN_POINTS_PER_CELL))
    half = max(1, width // 2)
    pca = re.search(r"PCA\w*?(\d+)", factory)
    reduced = int(pca[1]) if pca else half if "PCA" in factory else width
    codes = next(n for n in (64, 32, 16, 8, 4, 2, 1) if reduced % n == 0 and (n <= reduced // 2 or n == 1))
    defaults = {"Cells": cells, "IVF": cells, "PCA": half, "PCAR": half, "PQ": codes, "OPQ": codes}
    return "_".join(f"{part}{defaults.get(part, '')}" for part in re.split("[_,]", factory))


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cell_count(factory: str) -> int:
    """Return the number of cells in a factory string."""
    return max(map(int, re.findall(r"(?:Cells|IVF)(\d+)", factory)), default=1)
