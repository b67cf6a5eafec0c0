"""An artefact in shards that do not depend on one another: an engine makes them, and a killed run resumes with them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trime.common.io import read_tensors
from trime.common.progress import Progress
from trime.common.types import Tensor
from trime.lab.artefact import Artefact
from trime.lab.engines import MakeShard


@dataclass
class Work:
    """The work on an artefact, cut into shards; models and indexes are loaded when a shard needs them.

    ``files``: one of each shard, written whole or not at all. A file that is not itself of the artefact is ``part-…`` and named
    by its range, so that none of another cut is used; it is there until the artefact has its manifest, so that a killed build
    still finds it. ``sizes``: the work of each shard, in the unit of progress. ``make`` makes a shard by its number, and calls
    ``advance(n)`` after n units.
    """

    files: list[Path]
    sizes: list[int]
    make: MakeShard
    in_order: bool = False  # each shard needs the state in which the one before it left this process
    can_begin: Callable[[int], bool] = lambda number: True  # of shards in order: whether one can be the first of a process

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are still to be made."""
        missing = [number for number, file in enumerate(self.files) if not file.exists()]
        if not missing or not self.in_order:
            return missing
        first = next(number for number in range(missing[0], -1, -1) if number == 0 or self.can_begin(number))
        return [*range(first, len(self.files))]

    def done(self) -> int:
        """Return the amount of work that earlier runs have done."""
        return sum(self.sizes) - sum(self.sizes[number] for number in self.missing())


class ShardedArtefact(Artefact):
    """An artefact that is made shard by shard, by whichever engine the experiment chose."""

    @abstractmethod
    def work(self, folder: Path) -> Work:
        """Return the work on this artefact, which is being made in ``folder``."""

    def make_shards(self, work: Work, folder: Path, title: str, unit: str = "tok") -> None:
        """Make the missing shards under a progress bar; ``unit`` is that of their sizes."""
        with Progress(total=sum(work.sizes), unit=unit, unit_scale=unit == "tok", desc=title) as bar:
            self.lab.make_shards(self, work, folder, bar)


def read_shard(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a shard's file, and the note that was written with them."""
    return read_tensors(file, "delete it, and run the same command again")


def prefixed(prefix: str, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return columns under the names ``prefix.NAME`` that they have in a shard's file."""
    return {f"{prefix}.{name}": column for name, column in columns.items()}


def unprefixed(columns: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the columns of a prefix, as they were given to ``prefixed``; none if there are no such."""
    return {name.removeprefix(f"{prefix}."): column for name, column in columns.items() if name.startswith(f"{prefix}.")}
