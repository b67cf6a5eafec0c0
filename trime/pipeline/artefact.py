"""An artefact: the output of a stage, in a folder named by the hash of exactly what determines its content.

It is built in ``NAME.partial`` under a lock and renamed when it is complete; a killed build resumes there. A manifest with
the size and checksum of every file tells whether it is still what was written. Where ``paths`` names a URL, the folder is this
machine's copy.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from trime.errors import UserError
from trime.io import lock_of, locked, partial_of
from trime.pipeline.manifest import MANIFEST, check_manifest, part_files, write_manifest
from trime.pipeline.settings import Configured
from trime.places import Place, complete_files, fetch_folder


class Artefact(Configured, ABC):
    """A folder that is built once and found again by its fingerprint.

    ``settings()`` is everything outside ``needs()`` that determines the content. ``format`` is increased whenever the layout of
    the folder changes. ``summary_file`` is the JSON file that ``summary()`` returns.
    """

    kind: ClassVar[str]
    format: ClassVar[int] = 1
    summary_file: ClassVar[str]

    @property
    def stage(self) -> str:
        """The stage that builds it."""
        return self.kind

    def needs(self) -> list[Artefact]:
        """Return the artefacts that this one is made from."""
        return []

    def build_order(self) -> list[Artefact]:
        """Return this artefact after those of its needs that the same stage makes, each of them in its own build order."""
        needs = [each for need in self.needs() if need.stage == self.stage for each in need.build_order()]
        return [*dict.fromkeys(needs), self]

    @abstractmethod
    def build(self, folder: Path) -> None:
        """Write the content into ``folder``, resuming from the files that a killed build left there."""

    def root(self) -> Place:
        """Return where artefacts of this kind lie."""
        return Place(self.config.paths.outputs) / "artefacts"

    @cached_property
    def fingerprint(self) -> str:
        """The hash of kind, format, settings and the fingerprints of the artefacts it is made from."""
        content = [self.kind, self.format, self.settings(), [need.fingerprint for need in self.needs()]]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """The kind and the fingerprint."""
        return f"{self.kind}-{self.fingerprint}"

    @property
    def place(self) -> Place:
        """Where the artefact lies: a folder of this machine, or at a URL, where it is finished when it has a manifest."""
        return self.root() / self.name

    @property
    def folder(self) -> Path:
        """The folder of the finished artefact on this machine, whether or not it exists yet."""
        return self.place.local

    def path(self) -> Path:
        """Return the finished folder; raise UserError if it is missing, or its files are not as they were written.

        What is finished at the URL of its place is copied to this machine.
        """
        if not self.folder.is_dir() and self.is_uploaded():
            self.download()
        if not self.folder.is_dir():
            raise UserError(
                f"{self.folder} is missing: first run the same command without stages=, or add {self.stage} to stages="
            )
        places = f"{self.folder} and {self.place.address}" if self.place.is_remote else self.folder
        remedy = f"delete {places}, and the same command makes it anew (stage {self.stage})"
        check_manifest(self.folder, self.name, remedy, self.config.artefacts.verify)
        return self.folder

    def read(self, name: str) -> Any:
        """Return the content of a JSON file in the finished folder."""
        return json.loads((self.path() / name).read_text())

    def summary(self) -> Any:
        """Return what the finished artefact says about itself, the content of ``summary_file``."""
        return self.read(self.summary_file)

    def make(self) -> bool:
        """Build the artefact unless it exists; return whether it was built now."""
        if not self.folder.is_dir() and self.is_uploaded():
            return False
        for need in self.needs():
            need.path()
        if self.folder.is_dir():
            self.path()
            return False
        self.root().local.mkdir(parents=True, exist_ok=True)
        with locked(lock_of(self.folder), f"building {self.folder}"):
            is_made_here = not self.folder.is_dir()  # else another process made it meanwhile
            if is_made_here:
                partial = partial_of(self.folder)
                partial.mkdir(exist_ok=True)
                if self.place.is_remote and not any(partial.iterdir()):
                    self.place.download(into=partial)  # what another machine began
                if not (partial / MANIFEST).is_file():  # else it is complete, and its upload failed
                    self.build_in(partial)
                for part in part_files(partial):
                    part.unlink()
                if self.place.is_remote:
                    self.upload(partial)
                partial.replace(self.folder)
        return is_made_here

    def build_in(self, partial: Path) -> None:
        """Build the artefact in its unfinished folder, up to its manifest."""
        started = time.perf_counter()
        try:
            with self.place.mirrored(partial):
                self.build(partial)
        finally:
            remove_empty(partial)
        write_manifest(partial, self.name, time.perf_counter() - started)

    def is_uploaded(self) -> bool:
        """Return whether the finished artefact lies at the URL of its place."""
        return self.place.is_remote and self.place.holds(MANIFEST)

    def upload(self, folder: Path) -> None:
        """Copy the finished artefact to its URL, the manifest last, and remove there what it no longer consists of."""
        names = [name for name in complete_files(folder) if name != MANIFEST]
        self.place.upload(names, folder)
        self.place.remove(self.place.files().keys() - names)
        self.place.upload([MANIFEST], folder)

    def download(self) -> None:
        """Copy the finished artefact from its URL; what this machine had begun of it is no longer needed."""
        fetch_folder(self.folder, self.place.address, lambda copy: self.place.download(into=copy))
        shutil.rmtree(partial_of(self.folder), ignore_errors=True)


def remove_empty(folder: Path) -> None:
    """Remove a folder that holds nothing to resume from."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
