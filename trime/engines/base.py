"""The interface of engines: a job's parts are made, each by one process, in any order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the command line imports this room, and answers without numpy and fsspec
    from trime.places import Place

Advance = Callable[[int], object]  # is told how much of the work has been done since the last call
MakePart = Callable[[int, Advance], None]  # makes the part of a number


class Job(NamedTuple):
    """An artefact whose parts are made in ``folder``, so described that another process can open it.

    ``open`` is a function at the level of a module that returns what makes the parts; it loads models once a process.
    """

    open: Callable[[Job], MakePart]
    settings: str  # the resolved configuration as YAML
    stage: str
    name: str  # of the artefact
    folder: Path
    place: Place | None = None  # where the artefact will lie, if that is a URL: workers need not see ``folder``
    reads: tuple[str, ...] = ()  # files in the folder that each part needs


class Engine(ABC):
    """Makes the parts of a job."""

    @abstractmethod
    def run(self, job: Job, make: MakePart, numbers: list[int], advance: Advance) -> None:
        """Make the parts of these numbers; ``make`` does so in this process.

        A part that is made stays made, whatever happens to others. UserError for a user's mistake, as ``make`` raises it.
        """
