"""An artefact: what a stage leaves, in a folder named by the hash of exactly what determines it.

It is built in ``NAME.partial`` under a lock and renamed when whole; a killed build goes on there. A
manifest of file sizes lets a truncated artefact be told from a whole one.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock, Timeout
from omegaconf import DictConfig

from trime.io import write_atomically
from trime.types import UserError

MANIFEST = "manifest.json"


class Artefact(ABC):
    """Built once, found again by its fingerprint. ``format`` goes up when the layout of the folder changes."""

    kind: ClassVar[str]
    format: ClassVar[int] = 1
    stage: ClassVar[str]  # the stage that makes it

    def __init__(self, config: DictConfig):
        self.config = config

    @abstractmethod
    def settings(self) -> Any:
        """The part of the configuration, and of the world, that determines the content."""

    def needs(self) -> list[Artefact]:
        """The artefacts it is made from."""
        return []

    @abstractmethod
    def build(self, folder: Path) -> None:
        """Makes the content in ``folder``, going on with what a killed build left there."""

    def root(self) -> Path:
        return Path(self.config.paths.outputs) / "artefacts"

    @cached_property
    def fingerprint(self) -> str:
        """Hash of kind, format, settings and what it is made from."""
        content = [self.kind, self.format, self.settings(), [need.fingerprint for need in self.needs()]]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]

    @property
    def folder(self) -> Path:
        return self.root() / f"{self.kind}-{self.fingerprint}"

    def path(self) -> Path:
        """The finished folder; UserError where it is missing or truncated."""
        if not self.folder.is_dir():
            raise UserError(
                f"{self.folder} is missing: first run the same command without stages=, or add {self.stage} to them"
            )
        check_manifest(self.folder)
        return self.folder

    def read(self, name: str) -> Any:
        """Return what a JSON file of the finished folder holds."""
        return json.loads((self.path() / name).read_text())

    def make(self) -> bool:
        """Builds it unless it exists; True where it was built now."""
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
        lock = FileLock(self.root() / f".{self.kind}-{self.fingerprint}.lock")
        try:
            lock.acquire(timeout=0)
            lock.release()
        except Timeout:
            print(f"waiting for another run that makes {self.folder}")
        return lock


def remove_empty(folder: Path) -> None:
    """Nothing is kept where there is nothing to go on from."""
    if not any(folder.iterdir()):
        folder.rmdir()


def write_manifest(folder: Path) -> None:
    """Lists every file's size, after what killed builds left half-written is gone."""
    for debris in folder.rglob("*.partial"):
        debris.unlink()
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]
    write_atomically(
        folder / MANIFEST, json.dumps({str(path.relative_to(folder)): path.stat().st_size for path in files}, indent=0)
    )


def check_manifest(folder: Path) -> None:
    """Raises UserError where a file is missing or has another size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        raise UserError(f"{folder} has no readable {MANIFEST}: delete the folder and run again") from None
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(f"{path} is missing or truncated: delete {folder} and run again")
