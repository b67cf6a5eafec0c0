"""Folders by path or by URL (s3://, gs://, file:// of a shared disk): what lies at a URL has a copy on each machine.

A file is copied whole or not at all: to this machine when it is first needed, to the URL when it is complete. Every protocol of
fsspec is understood, and finds its credentials and options as it always does, in variables and files of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from trime.errors import UserError
from trime.io import PARTIAL, FileState, lock_of, locked, partial_of, remove_half_written, replacing, write_atomically
from trime.progress import Progress
from trime.remote import FULL, StoredFile, opened_system, put, reaching

if TYPE_CHECKING:  # imported when there is a URL
    from fsspec import AbstractFileSystem

COPIES = "TRIME_CACHE"  # the variable that names the folder of this machine's copies
THREADS = 8  # files that are copied at once
MIRROR = 60  # seconds between copies of what is being made
BAR_BYTES = 2**28  # copies that are larger in all have a progress bar


copied: dict[tuple[str, str], FileState] = {}  # by URL and name: what this process has copied


class Place(NamedTuple):
    """A folder or file by its path or its URL. It means the same on every machine; ``local`` is each machine's own."""

    address: str

    @property
    def is_remote(self) -> bool:
        """Whether the address is a URL, not a path."""
        return re.match(r"[A-Za-z][\w+.-]*://", self.address) is not None

    @property
    def local(self) -> Path:
        """Its path on this machine: its own, or that of the copy of what lies at the URL."""
        if not self.is_remote:
            return Path(self.address).expanduser()
        scheme, _, rest = self.address.partition("://")
        parts = [part for part in rest.split("/") if part not in ("", ".", "..")]
        return copies() / re.sub(r"\W", "_", scheme) / Path(*parts)

    def __truediv__(self, name: str | Path) -> Place:
        """Return the place of what lies in the folder under a name, which may be a path below it."""
        if not self.is_remote:
            return Place(str(Path(self.address) / name))
        return Place(f"{self.address.rstrip('/')}/{PurePosixPath(name)}")

    def files(self) -> dict[str, StoredFile]:
        """Return the complete files at the URL by their path below it; ``""`` is a URL that is itself a file."""
        system, root = self.system
        found: dict[str, Any] = {}
        with reaching(self.address), suppress(FileNotFoundError):
            found = system.find(root, detail=True)
        files = {str(path)[len(root) :].lstrip("/"): StoredFile.of(entry) for path, entry in found.items()}
        if any(".." in PurePosixPath(name).parts for name in files):
            raise UserError(f"{self.address} holds names with '..': remove them")
        return {name: file for name, file in files.items() if not name.endswith(PARTIAL)}

    def holds(self, name: str) -> bool:
        """Return whether there is a file of this name at the URL."""
        system, root = self.system
        with reaching(self.address):
            return bool(system.exists(f"{root}/{name}"))

    @property
    def system(self) -> tuple[AbstractFileSystem, str]:
        """The file system of the URL, and the path in it."""
        return opened_system(self.address)

    def download(self, names: Iterable[str] | None = None, into: Path | None = None) -> dict[str, StoredFile]:
        """Copy files from the URL that are not here as they are there, by default all, to ``local``; return what lies there."""
        there, (system, root), folder = self.files(), self.system, into or self.local
        make_folder(folder.parent)
        wanted = there if names is None else {name: there[name] for name in names if name in there}
        missing = {name: file.size for name, file in wanted.items() if not file.is_copied(folder / name)}

        def copy(name: str) -> None:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as partial, reaching(self.address):
                system.get_file(f"{root}/{name}" if name else root, str(partial))
            if state := FileState.of(target):
                copied[self.address, name] = state

        each_file(f"download {folder.name}", missing, copy)
        return there

    def read_bytes(self, name: str, first: int, last: int) -> bytes:
        """Return bytes ``first`` to before ``last`` of a file at the URL, fewer where it ends."""
        system, root = self.system
        with reaching(self.address):
            return bytes(system.cat_file(f"{root}/{name}", start=first, end=last))

    def upload(self, names: Iterable[str], source: Path | None = None) -> None:
        """Copy files to the URL, by default from ``local``, each of which replaces the one that is there.

        Those that this process has copied in either direction, and that have not changed since, are left out.
        """
        (system, root), folder = self.system, source or self.local
        states = {name: state for name in names if (state := FileState.of(folder / name))}
        changed = {name: state.size for name, state in states.items() if copied.get((self.address, name)) != state}

        def copy(name: str) -> None:
            put(system, folder / name, f"{root}/{name}", self.address)
            copied[self.address, name] = states[name]

        each_file(f"upload {folder.name}", changed, copy)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files at the URL, named by their path below it; UserError if the storage refuses, or lacks one of them."""
        system, root = self.system
        with reaching(self.address):
            for name in names:
                system.rm_file(f"{root}/{name}")

    def check(self) -> None:
        """Raise UserError if nothing can be written at the URL."""
        system, root = self.system
        with reaching(self.address):
            system.makedirs(root, exist_ok=True)
            system.pipe_file(f"{root}/.trime", b"a folder of TRIME Lab")

    @contextmanager
    def mirrored(self, source: Path) -> Iterator[None]:
        """Copy the complete files of a folder to the URL every ``MIRROR`` seconds during a block, and when it fails.

        So another machine can go on with what this one began. Does nothing for a place on this machine.
        """
        if not self.is_remote:
            yield
            return
        done = Event()

        def mirror() -> None:
            while not done.wait(MIRROR):
                with suppress(UserError, OSError):  # what cannot be copied now is copied later, or told at the end
                    self.upload(complete_files(source), source)

        thread = Thread(target=mirror, daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            done.set()
            with suppress(UserError):
                self.upload(complete_files(source), source)
            raise
        finally:
            done.set()
            thread.join()


def fetch_folder(folder: Path, address: str, copy: Callable[[Path], object]) -> None:
    """Make a folder from what lies at a URL, whole or not at all, unless it is here; ``copy`` fills the folder it is given.

    Other processes of this machine wait meanwhile. A copy that was interrupted goes on.
    """
    make_folder(folder.parent)
    with locked(lock_of(folder), f"copying {address}"):
        if not folder.is_dir():
            partial = partial_of(folder.with_name(f"{folder.name}.copy"))
            partial.mkdir(exist_ok=True)
            remove_half_written(partial)
            copy(partial)
            partial.replace(folder)


def complete_files(folder: Path) -> list[str]:
    """Return the files of a folder that are written, by their path below it: no locks, and none that is being written."""
    files = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [str(file) for file in files if not any(part.endswith(PARTIAL) or ".lock" in part for part in file.parts)]


def make_folder(folder: Path) -> None:
    """Make a folder for copies; UserError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(f"{folder}: {error.strerror}: set {COPIES} to a folder that can be written") from None


def copies() -> Path:
    """Return the folder of this machine's copies of what lies at URLs."""
    return Path(os.environ.get(COPIES) or "~/.cache/trime").expanduser()


def local_copy(path: str | Path) -> Path:
    """Return a path on this machine: the one that is given, or that of the copy of what lies at a URL, made now."""
    place = Place(str(path))
    if place.is_remote:
        fetch_once(place)
    return place.local


@cache
def fetch_once(place: Place) -> None:
    """Copy what lies at a URL to this machine, and remove copies of what lies there no longer; UserError if nothing does."""
    there = place.download()
    if not there:
        raise UserError(f"{place.address} does not exist, holds no files, or its server does not answer")
    copied_before = place.local.with_name(f".{place.local.name}.copied")  # names of files, a line each
    for name in {*copied_before.read_text().split("\n")} - there.keys() if copied_before.is_file() else ():
        if (place.local / name).is_file():
            (place.local / name).unlink()
    write_atomically(copied_before, "\n".join(there))


def each_file(title: str, sizes: dict[str, int], copy: Callable[[str], Any]) -> None:
    """Copy files by several threads, under a progress bar if they are large."""
    total = sum(sizes.values())
    with (
        ThreadPoolExecutor(THREADS) as pool,
        Progress(total=total, unit="B", unit_scale=True, desc=title, disable=total < BAR_BYTES) as bar,
    ):
        for name, _ in zip(sizes, pool.map(copy, sizes), strict=True):
            bar.update(sizes[name])
