"""An artefact: the output of a stage, in a folder named by the hash of exactly the settings and inputs that determine it.

It is built in ``NAME.partial`` under a lock and renamed when it is complete; a killed build resumes there. A manifest with
the size and checksum of every file tells whether it is unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from trime.common.identity import Free, fingerprint_of, hashed_fields, identity_of
from trime.common.io import lock_of, locked, partial_of
from trime.errors import UserError
from trime.lab.manifest import MANIFEST, check_manifest, part_files, write_manifest


@dataclass(frozen=True)
class Lab:
    """The folder of artefacts and the engine that makes their shards; no result depends on either.

    ``outputs`` is a project's own folder; artefacts of text are in ``data``, which projects may share. ``verify``: the
    checksums of an artefact are compared before it is used, not only sizes. ``make_shards`` makes the missing shards of an
    artefact by the configured engine, under a progress bar.
    """

    outputs: Path
    data: Path
    verify: bool
    make_shards: Callable[[Any, Any, Path, Any], None]


def artefacts_in(value: Any) -> Iterator[Artefact]:
    """Yield the artefacts that a value is or holds, at any depth of dataclasses and lists."""
    if isinstance(value, Artefact):
        yield value
    elif hasattr(value, "needs"):
        yield from value.needs()
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from artefacts_in(item)
    elif dataclasses.is_dataclass(value):
        yield from artefacts_in(hashed_fields(value))


class Artefact(ABC):
    """A folder that is built once and found again by its fingerprint.

    Subclasses are frozen dataclasses (``eq=False, repr=False``), with the artefacts that they are made from and the settings
    that they read as fields. These determine the content, but for those that are ``Free``, such as ``lab``. ``format`` is
    increased whenever the layout of the folder changes. ``summary_file`` is the JSON file that ``summary()`` returns.
    """

    kind: ClassVar[str]
    format: ClassVar[int] = 1
    summary_file: ClassVar[str]
    lab: Free[Lab]

    def __repr__(self) -> str:  # all fields, with those of the artefacts among them, would fill pages
        return f"{type(self).__name__}()"

    @property
    def stage(self) -> str:
        """The stage that builds it."""
        return self.kind

    def needs(self) -> list[Artefact]:
        """Return the artefacts that this one is made from: those in its fields."""
        return [*dict.fromkeys(artefacts_in(hashed_fields(self)))]

    def with_needs(self) -> list[Artefact]:
        """Return this artefact after all that it is made from, directly or not."""
        return [*dict.fromkeys(each for need in self.needs() for each in need.with_needs()), self]

    def build_order(self) -> list[Artefact]:
        """Return this artefact after those that it is made from and that the same stage makes."""
        return [each for each in self.with_needs() if each.stage == self.stage]

    @abstractmethod
    def build(self, folder: Path) -> None:
        """Write the content into ``folder``, resuming from the files that a killed build left there."""

    def root(self) -> Path:
        """Return the folder that holds artefacts of this kind."""
        return self.lab.outputs / "artefacts"

    def identity(self) -> Any:
        """Return the identity of the content as plain data: all fields that are not free, artefacts by their fingerprint."""
        return {name: identity_of(value) for name, value in hashed_fields(self).items()}

    @cached_property
    def fingerprint(self) -> str:
        """The hash of kind, format, identity, and of the artefacts that it is made from, wherever its fields hold them."""
        return fingerprint_of([self.kind, self.format, self.identity(), [need.fingerprint for need in self.needs()]])

    @property
    def name(self) -> str:
        """The kind and the fingerprint."""
        return f"{self.kind}-{self.fingerprint}"

    @property
    def folder(self) -> Path:
        """The folder of the finished artefact, whether or not it exists yet."""
        return self.root() / self.name

    def path(self) -> Path:
        """Return the finished folder; raise UserError if it is missing, or its files are not as they were written."""
        if not self.folder.is_dir():
            raise UserError(
                f"{self.folder} is missing: first run the same command without stages=, or add {self.stage} to stages="
            )
        remedy = f"delete {self.folder}, and the same command makes it anew (stage {self.stage})"
        check_manifest(self.folder, self.name, remedy, self.lab.verify)
        return self.folder

    def read(self, name: str) -> Any:
        """Return the content of a JSON file in the finished folder."""
        return json.loads((self.path() / name).read_text(encoding="utf-8"))

    def summary(self) -> Any:
        """Return the finished artefact's description of itself, the content of ``summary_file``."""
        return self.read(self.summary_file)

    def make(self) -> bool:
        """Build the artefact unless it exists; return whether it was built now."""
        for need in self.needs():
            need.path()
        if self.folder.is_dir():
            self.path()
            return False
        self.root().mkdir(parents=True, exist_ok=True)
        with locked(lock_of(self.folder), f"building {self.folder}"):
            if self.folder.is_dir():  # another process made it meanwhile
                return False
            partial, started = partial_of(self.folder), time.perf_counter()
            partial.mkdir(exist_ok=True)
            if not (partial / MANIFEST).is_file():  # else a build was killed after it was complete
                try:
                    self.build(partial)
                finally:
                    if partial.is_dir() and not any(partial.iterdir()):  # nothing to resume from
                        partial.rmdir()
                write_manifest(partial, self.name, time.perf_counter() - started)
            for file in part_files(partial):
                file.unlink()
            partial.replace(self.folder)
        return True
