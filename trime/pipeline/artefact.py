"""An artefact: the output of a stage, in a folder named by the hash of exactly what determines its content.

It is built in ``NAME.partial`` under a lock and renamed when it is complete; a killed build resumes there. A
manifest of file sizes distinguishes complete artefacts from truncated ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock, Timeout

from trime.io import write_atomically
from trime.pipeline.settings import Configured
from trime.types import UserError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"


class Artefact(Configured, ABC):
    """A folder that is built once and found again by its fingerprint.

    ``settings()`` is everything outside ``needs()`` that determines the content. ``format`` is increased whenever the layout of
    the folder changes.
    """

    kind: ClassVar[str]
    format: ClassVar[int] = 1

    @property
    def stage(self) -> str:
        """The stage that builds it."""
        return self.kind

    def needs(self) -> list[Artefact]:
        """Return the artefacts that this one is made from."""
        return []

    @abstractmethod
    def build(self, folder: Path) -> None:
        """Write the content into ``folder``, resuming from the files that a killed build left there."""

    def root(self) -> Path:
        """Return the folder in which artefacts of this kind lie."""
        return Path(self.config.paths.outputs) / "artefacts"

    @cached_property
    def fingerprint(self) -> str:
        """The hash of kind, format, settings and the fingerprints of the artefacts it is made from."""
        content = [self.kind, self.format, self.settings(), [need.fingerprint for need in self.needs()]]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]

    @property
    def folder(self) -> Path:
        """The folder of the finished artefact, whether or not it exists yet."""
        return self.root() / f"{self.kind}-{self.fingerprint}"

    def path(self) -> Path:
        """Return the finished folder; raise UserError if it is missing or truncated."""
        if not self.folder.is_dir():
            raise UserError(
                f"{self.folder} is missing: first run the same command without stages=, or add {self.stage} to stages="
            )
        check_manifest(self.folder)
        return self.folder

    def read(self, name: str) -> Any:
        """Return the content of a JSON file in the finished folder."""
        return json.loads((self.path() / name).read_text())

    def make(self) -> bool:
        """Build the artefact unless it exists; return whether it was built now."""
        for need in self.needs():
            need.path()
        if self.folder.is_dir():
            self.path()
            return False
        self.root().mkdir(parents=True, exist_ok=True)
        with self.lock():
            if not self.folder.is_dir():
                partial = self.folder.with_name(self.folder.name + ".partial")
                partial.mkdir(exist_ok=True)
                try:
                    self.build(partial)
                finally:
                    remove_empty(partial)
                write_manifest(partial)
                partial.replace(self.folder)
        return True

    def lock(self) -> FileLock:
        """Return the lock that a build holds, after printing a note if another run holds it at the moment."""
        lock = FileLock(self.root() / f".{self.kind}-{self.fingerprint}.lock")
        try:
            lock.acquire(timeout=0)
            lock.release()
        except Timeout:
            log.info(f"waiting for another run that is building {self.folder}")
        return lock


def remove_empty(folder: Path) -> None:
    """Remove a folder that holds nothing to resume from."""
    if not any(folder.iterdir()):
        folder.rmdir()


def write_manifest(folder: Path) -> None:
    """Write the size of every file to the manifest, after deleting half-written files of killed builds."""
    for debris in folder.rglob("*.partial"):
        debris.unlink()
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]
    write_atomically(
        folder / MANIFEST, json.dumps({str(path.relative_to(folder)): path.stat().st_size for path in files}, indent=0)
    )


def check_manifest(folder: Path) -> None:
    """Raise UserError if a file of the manifest is missing or has another size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        raise UserError(f"{folder} has no readable {MANIFEST}: delete the folder and run again") from None
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(f"{path} is missing or truncated: delete {folder} and run again")
