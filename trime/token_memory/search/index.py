"""Indices over a datastore: the builders that ``index.factory`` names, and the slices that several workers search.

Keys sorted by cell are one index, and a slice is some of its cells. Any other index is built once for each slice's keys, with
shared centroids and codes. Every slice searches the cells that a single index would search, so that any number of slices
finds the same entries. The setting ``index.parts`` is their number.
"""

from __future__ import annotations

import math
import os
import pkgutil
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from trime.errors import UserError
from trime.token_memory.search.datastore import Keys, Shards
from trime.token_memory.search.faiss_index import FaissBuilder
from trime.token_memory.search.ivf import Cells, IVFBuilder, IVFSearch
from trime.token_memory.search.search import MIN_POINTS_PER_CELL, ExactSearch, Search

AUTO = "auto"  # index.factory: chosen by the number of keys
EXACT_UP_TO = 2**17  # keys that index=auto searches exactly: about ten milliseconds per 100 queries


@runtime_checkable
class IndexBuilder(Protocol):
    """A kind of index over keys, which ``index.factory`` names."""

    def check(self, entries: int, width: int, metric: str) -> None:
        """Raise a UserError if so many keys of this width cannot be indexed."""
        ...

    def train(self, keys: Keys, metric: str, folder: Path) -> Path:
        """Write the quantisers that all slices share to a file ``learned.…``, unless it is there; return its path."""
        ...

    def fill(self, keys: Keys, metric: str, trained: Path, folder: Path, bar: Any) -> None:
        """Index a slice's keys in its folder, and advance the progress bar by their number; a killed run resumes."""
        ...

    def open(self, folder: Path, metric: str, nprobe: int, device: str) -> Search:
        """Return the search over a filled slice; a larger ``nprobe`` (index.nprobe) compares more keys."""
        ...


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


def divides_by_cells(factory: str | None) -> bool:
    """Return whether the slices of a search are cells of one index, rather than indices of some keys each."""
    return factory is not None and isinstance(builder_of(factory), IVFBuilder)


class IndexSlice(NamedTuple):
    """Entries ``first`` to ``last`` of a store, and the folder of their index; without a factory every key is compared.

    ``by_cells``: ``first`` and ``last`` number cells of the index in ``folder`` instead.
    """

    store: Path
    first: int
    last: int
    folder: Path
    factory: str | None
    metric: str
    by_cells: bool = False

    def search(self, nprobe: int, device: str = "cpu") -> Search:
        """Open the search over this slice."""
        if self.by_cells:
            return IVFSearch(self.folder, self.metric, nprobe, (self.first, self.last))
        if not self.factory:
            return ExactSearch(Keys(Shards(self.store), self.first, self.last).blocks, self.metric)
        return builder_of(self.factory).open(self.folder, self.metric, nprobe, device)


def split_entries(store: Path, count: int, folder: Path, factory: str | None, metric: str) -> list[IndexSlice]:
    """Return ``count`` slices with as many entries each; a single slice has its index in ``folder`` itself."""
    entries = len(Keys(Shards(store)))
    edges = [entries * number // count for number in range(count + 1)]
    folders = [folder] if count == 1 else [folder / f"part-{number:05d}" for number in range(count)]
    ends = zip(edges[:-1], edges[1:], folders, strict=True)
    return [IndexSlice(store, first, last, place, factory, metric) for first, last, place in ends]


def split_cells(whole: IndexSlice, count: int) -> list[IndexSlice]:
    """Return ``count`` slices of an index by cells, each with about as many entries; fewer if there are fewer cells."""
    start = Cells(whole.folder, whole.metric, 1).start
    wanted = [start[-1] * number // count for number in range(count + 1)]
    edges = np.unique(np.searchsorted(start, wanted)).tolist()
    return [whole._replace(first=first, last=last, by_cells=True) for first, last in pairwise(edges)]


def build_slices(slices: list[IndexSlice], folder: Path, bar: Any) -> None:
    """Build the index of all slices, one after another; ``folder`` keeps the quantisers, so that a killed run resumes."""
    store, factory, metric = slices[0].store, slices[0].factory, slices[0].metric
    if factory is None:
        bar.update(slices[-1].last)
        return
    builder, shards = builder_of(factory), Shards(store)
    trained = builder.train(Keys(shards), metric, folder)  # on a sample of the whole store, for all slices
    for one in slices:
        one.folder.mkdir(exist_ok=True)
        builder.fill(Keys(shards, one.first, one.last), metric, trained, one.folder, bar)


def choose_factory(entries: int, width: int, slices: int = 1) -> str | None:
    """Return the factory of index=auto: exact if that is fast, cells if a slice fits in half the memory, else PQ codes."""
    if entries <= EXACT_UP_TO:
        return None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return complete_factory("Cells" if 2 * width * entries / slices <= memory / 2 else "IVF_PQ", entries, width)


def complete_factory(factory: str | None, entries: int, width: int) -> str | None:
    """Fill in the numbers that a factory string leaves out: about √n cells, half of the dimensions, at most 64 codes."""
    if factory is None:
        return None
    cells = max(1, min(2 ** round(math.log2(math.sqrt(entries))), entries // MIN_POINTS_PER_CELL))
    half = max(1, width // 2)
    pca = re.search(r"PCA\w*?(\d+)", factory)
    reduced = int(pca[1]) if pca else half if "PCA" in factory else width
    # FAISS needs a number of codes that divides the dimensions; at least two dimensions for each.
    codes = next(n for n in (64, 32, 16, 8, 4, 2, 1) if reduced % n == 0 and (n <= reduced // 2 or n == 1))
    defaults = {"Cells": cells, "IVF": cells, "PCA": half, "PCAR": half, "PQ": codes, "OPQ": codes}
    return "_".join(f"{step}{defaults.get(step, '')}" for step in re.split("[_,]", factory))


def cell_count(factory: str) -> int:
    """Return the number of cells in a factory string."""
    return max(map(int, re.findall(r"(?:Cells|IVF)(\d+)", factory)), default=1)
