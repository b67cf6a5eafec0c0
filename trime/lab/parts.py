"""An artefact in parts that do not depend on one another: what an engine makes, and what a killed run resumes with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trime.common.io import read_tensors
from trime.common.progress import Progress
from trime.common.types import Tensor
from trime.lab.artefact import Artefact
from trime.lab.engines import Advance


class Parts(ABC):
    """The parts of an artefact that is being made in ``folder``; models and indexes are loaded when a part needs them.

    A file that is not itself of the artefact is ``part-…`` and named by what it covers, so that none of another cut is used.
    Such files are there until the artefact has its manifest, so that a killed build still finds them.
    """

    folder: Path
    sizes: list[int]  # how much work each part is, in the unit of progress
    sequential: bool = False  # True: each part needs what the one before it left in this process

    @abstractmethod
    def file(self, number: int) -> Path:
        """Return the file of a part."""

    @abstractmethod
    def make(self, number: int, advance: Advance) -> None:
        """Make a part and write its file, whole or not at all; ``advance`` is told how much has been done."""

    def files(self) -> list[Path]:
        """Return the files of all parts, in order."""
        return [self.file(number) for number in range(len(self.sizes))]

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are still to be made."""
        return [number for number, file in enumerate(self.files()) if not file.exists()]

    def done(self) -> int:
        """Return how much of the work earlier runs have done."""
        return sum(self.sizes) - sum(self.sizes[number] for number in self.missing())


class ArtefactInParts(Artefact):
    """An artefact that is made part by part, by whichever engine the experiment chose."""

    @abstractmethod
    def open_parts(self, folder: Path) -> Parts:
        """Return the parts of this artefact, which is being made in ``folder``."""

    def make_parts(self, parts: Parts, title: str, unit: str = "tok") -> None:
        """Make the missing parts by the configured engine, under a progress bar; ``unit`` is that of their sizes."""
        with Progress(total=sum(parts.sizes), unit=unit, unit_scale=unit == "tok", desc=title) as bar:
            self.lab.run_parts(self, parts, bar)


def read_part(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a part, and the note that was written with them."""
    return read_tensors(file, "delete it, and run the same command again")


def grouped(group: str, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return columns under the names ``group.NAME`` that they have in a part's file."""
    return {f"{group}.{name}": column for name, column in columns.items()}


def columns_of(tensors: dict[str, Tensor], group: str) -> dict[str, Tensor]:
    """Return the columns of a group, as they were given to ``grouped``; none if there is no such group."""
    return {name.removeprefix(f"{group}."): tensor for name, tensor in tensors.items() if name.startswith(f"{group}.")}
