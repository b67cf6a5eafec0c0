"""Index builders: how a kind of index is trained on keys that all its parts share, filled with a part's keys, and opened."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from trime.errors import UserError
from trime.memory.retrieval.datastore import Keys
from trime.memory.retrieval.faiss_index import FaissSearch, create_index, fill_faiss, train_faiss
from trime.memory.retrieval.ivf import CELLS, CENTROIDS, IVFSearch, fill_ivf, train_ivf
from trime.memory.retrieval.search import Search, check_training_size


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
