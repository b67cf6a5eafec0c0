"""The interface of datasets."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

from trime.data.tokenizers import Tokenizer
from trime.errors import UserError
from trime.io import hash_of_files
from trime.places import local_copy

SPLITS = ("train", "valid", "test")


class Document(NamedTuple):
    """A document's name and the lines of its text as bytes, which may be read lazily."""

    name: str
    lines: Iterable[bytes]


class Dataset(ABC):
    """A text with splits into documents; ``location`` is where it lies, for messages and statistics."""

    name: str
    location: Path | str
    tokenizer: Tokenizer
    characters: bool = False  # tokens are characters: bits per character are reported
    own: bool = False  # a user's own text, for which nothing is published
    published: ClassVar[dict[str, int]] = {}  # token count in the literature, by split
    count_difference_reason: ClassVar[str] = ""

    @abstractmethod
    def files(self, split: str) -> list[Path]:
        """Return the files of a split, in order."""

    @abstractmethod
    def documents(self, split: str) -> Iterator[Document]:
        """Yield the documents of a split, in order."""

    def splits(self) -> list[str]:
        """Return the splits that exist."""
        return [split for split in SPLITS if self.files(split)]

    def size(self, split: str) -> int:
        """Return the size of a split in bytes, for progress bars."""
        return sum(path.stat().st_size for path in self.files(split))

    def fingerprint(self) -> str:
        """Return a hash of every file's name and content."""
        return hash_of_files((split, path) for split in SPLITS for path in self.files(split))

    def notes(self) -> list[str]:
        """Return remarks for the statistics."""
        return []


def files_below(folder: Path, suffix: str) -> list[Path]:
    """Return the files below a folder whose names end in ``suffix``, sorted; UserError at a pipe, a device or a broken link."""
    found = [path for path in sorted(folder.rglob(f"*{suffix}")) if not path.is_dir()]
    for path in found:
        if not path.is_file():
            raise UserError(f"{path} is not a regular file, but a pipe, a device or a broken link: remove it from the dataset")
    return found


def printable(name: str) -> str:
    """Return a file's name with what is not UTF-8 in it replaced."""
    return os.fsencode(name).decode("utf-8", "replace")


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; a byte order mark at its beginning is not text."""
    with open(path, "rb") as file:
        if file.read(len(BOM_UTF8)) != BOM_UTF8:
            file.seek(0)
        yield from file


def existing_folder(path: str | None, name: str) -> Path:
    """Return the folder that the user named; UserError where there is none. ``name`` is whose folder it is."""
    if path is None:
        raise UserError(
            f"{name} needs a folder: add dataset.path=DIR (or evaluate.dataset.path or datastore.dataset.path for other text)"
        )
    folder = local_copy(path)
    if not folder.is_dir():
        raise UserError(f"{name}: there is no folder {folder}: set dataset.path to one that exists")
    return folder
