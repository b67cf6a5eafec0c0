"""What a dataset is."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

from trime.data.tokenizers import Tokenizer
from trime.types import UserError

SPLITS = ("train", "valid", "test")


class Document(NamedTuple):
    """A name, and the lines of its text as bytes, read when asked for."""

    name: str
    lines: Iterable[bytes]


class Dataset(ABC):
    """Text in splits of documents."""

    name: str
    place: Path | str
    tokenizer: Tokenizer
    characters: bool = False  # tokens are characters: bits per character are reported
    published: ClassVar[dict[str, int]] = {}  # split: token count in the literature
    why_counts_differ: ClassVar[str] = ""

    @abstractmethod
    def files(self, split: str) -> list[Path]:
        """The files that hold a split, in order."""

    @abstractmethod
    def documents(self, split: str) -> Iterator[Document]:
        """The documents of a split, in order."""

    def splits(self) -> list[str]:
        """The splits that exist."""
        return [split for split in SPLITS if self.files(split)]

    def size(self, split: str) -> int:
        """Bytes of a split, for progress bars."""
        return sum(path.stat().st_size for path in self.files(split))

    def fingerprint(self) -> str:
        """Names the content: every file's name and bytes."""
        digest = hashlib.sha256()
        for split in SPLITS:
            for path in self.files(split):
                digest.update(f"{split}/{path.name}/{path.stat().st_size}\0".encode())
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:16]

    def notes(self) -> list[str]:
        """What a reader of the statistics should know."""
        return []


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file."""
    with open(path, "rb") as file:
        yield from file


def existing_folder(path: str | None, what: str) -> Path:
    """The folder a user named, or an error that says how to name one."""
    if path is None:
        raise UserError(
            f"{what} needs a folder: add dataset.path=DIR (of other text evaluate.dataset.path or datastore.dataset.path)"
        )
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"{what}: there is no folder {folder}: set dataset.path to one that exists")
    return folder
