"""The index over a datastore, in one or several parts that share what was trained (centroids, codes).

Every part searches the cells that a single index would search, so that any number of parts finds the same entries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from trime.memory.retrieval.builders import builder_of
from trime.memory.retrieval.datastore import Keys, Shards
from trime.memory.retrieval.search import ExactSearch, Search


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
        builder_of(self.factory).fill(self.keys, self.metric, trained, self.folder, bar)

    def search(self, nprobe: int, device: str = "cpu") -> Search:
        """Open the search over this part."""
        if not self.factory:
            return ExactSearch(self.keys.blocks, self.metric)
        return builder_of(self.factory).open(self.folder, self.metric, nprobe, device)


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


def check_factory(factory: str, entries: int, width: int, metric: str) -> None:
    """Raise a UserError if an index cannot be trained on so many keys."""
    builder_of(factory).check(entries, width, metric)
