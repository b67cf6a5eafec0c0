"""The interface of datasets, and how their files are read."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Iterable, Iterator
from functools import cached_property
from io import BytesIO, TextIOWrapper
from itertools import repeat
from pathlib import Path
from typing import ClassVar, NamedTuple

from trime.common.io import hash_of_files
from trime.common.progress import Progress
from trime.common.urls import local_copy
from trime.data.datasets.copies import COPIED, RUN, copied_shares_in_order
from trime.data.tokenizers import Tokenizer
from trime.errors import UserError

SPLITS = ("train", "valid", "test")
COPIES = ("say", "drop")  # ways to treat near copies
# In this order, because the mark of UTF-32 (little-endian) begins with that of UTF-16.
WIDE = {BOM_UTF32_LE: "utf-32", BOM_UTF32_BE: "utf-32", BOM_UTF16_LE: "utf-16", BOM_UTF16_BE: "utf-16"}


class Document(NamedTuple):
    """A document's name, the lines of its text as bytes, which may be read lazily, and the number of the first in its file."""

    name: str
    lines: Iterable[bytes]
    first_line: int | None = None  # None: a place in it has no line of a file

    def line_numbers(self, tokenizer: Tokenizer) -> Iterator[int]:
        """Yield for each token of the document the number of its line; nothing where lines have no numbers."""
        if self.first_line is None:
            return
        number = self.first_line - 1

        def counted() -> Iterator[bytes]:
            nonlocal number
            for line in self.lines:
                number += 1
                yield line

        for symbols in tokenizer.tokens(counted()):
            yield from repeat(number, len(symbols))


class Dataset(ABC):
    """A text with splits into documents; ``location`` is where it lies, for messages and statistics."""

    name: str
    location: Path | str
    tokenizer: Tokenizer
    characters: bool = False  # tokens are characters: bits per character are reported
    own: bool = False  # a user's own text, for which nothing is published
    published: ClassVar[dict[str, int]] = {}  # token count in the literature, by split
    count_difference_reason: ClassVar[str] = ""
    more_documents: str = "add documents to it"  # how a split gets more of them, for messages
    lab_folders: tuple[Path, ...] = ()  # where the lab writes: nothing below them is text
    copies: str = "say"  # near copies of other documents: "drop" leaves them out, "say" keeps them

    @abstractmethod
    def files(self, split: str) -> list[Path]:
        """Return the files of a split, in order."""

    @abstractmethod
    def documents(self, split: str) -> Iterator[Document]:
        """Yield the documents of a split, in order, near copies among them."""

    def kept_documents(self, split: str) -> Iterator[Document]:
        """Yield the documents of a split, in order; without near copies if ``copies`` is drop. UserError if none is left."""
        left_out, kept_any = self.near_copies[split], False
        for number, document in enumerate(self.documents(split)):
            if number not in left_out:
                kept_any = True
                yield document
        if left_out and not kept_any:
            raise UserError(f"dataset {self.name}: {split} holds near copies of other documents only: set dataset.copies=say")

    @cached_property
    def near_copies(self) -> dict[str, dict[int, int]]:
        """The near copies that are left out of each split: their numbers with their bytes.

        Test is read first, then valid, then train, so that text to be scored stays where training text is its copy.
        """
        found: dict[str, dict[int, int]] = {split: {} for split in SPLITS}
        if self.copies == "say":
            return found
        read: list[tuple[str, int, int]] = []  # split, number and bytes of each document

        def texts() -> Iterator[bytes]:
            with Progress(total=sum(map(self.full_size, SPLITS)), unit="B", unit_scale=True, desc="find near copies") as bar:
                for split in reversed(SPLITS):
                    for number, document in enumerate(self.documents(split)):
                        text = b"".join(document.lines)
                        read.append((split, number, len(text)))
                        bar.update(len(text))
                        yield text

        shares = copied_shares_in_order(texts())
        for (split, number, size), share in zip(read, shares, strict=True):
            if share > COPIED:
                found[split][number] = size
        return found

    def copies_note(self) -> list[str]:
        """Return a remark on how many near copies were left out, if ``copies`` is drop."""
        if self.copies == "say":
            return []
        number, size = (sum(map(count, self.near_copies.values())) for count in (len, lambda found: sum(found.values())))
        share = 100 * size / max(1, size + sum(map(self.size, SPLITS)))
        return [
            f"{number:,} near copies left out, {share:.1f} % of the text: more than {COPIED:.0%} of each lies in runs of {RUN} "
            "words of another document (dataset.copies=say keeps them)"
        ]

    def splits(self) -> list[str]:
        """Return the splits that exist."""
        return [split for split in SPLITS if self.files(split)]

    def size(self, split: str) -> int:
        """Return the size of a split's documents in bytes, without near copies that are left out."""
        return self.full_size(split) - sum(self.near_copies[split].values())

    def full_size(self, split: str) -> int:
        """Return the size of a split's text in bytes."""
        return sum(path.stat().st_size for path in self.files(split))

    def fingerprint(self) -> str:
        """Return a hash of every file's name and content, and of its encoding where that is not UTF-8."""
        return hash_of_files((f"{split}{wide_encoding(path)}", path) for split in SPLITS for path in self.files(split))

    def notes(self) -> list[str]:
        """Return remarks for the statistics."""
        return []


def printable(name: str) -> str:
    """Return a file's name in which bytes that are not UTF-8 are replaced."""
    return os.fsencode(name).decode("utf-8", "replace")


def wide_encoding(text: Path | bytes) -> str:
    """Return utf-16 or utf-32 if a file or its content begins with their byte order mark, else an empty text."""
    if isinstance(text, Path):
        with open(text, "rb") as file:
            text = file.read(4)
    return next((encoding for mark, encoding in WIDE.items() if text.startswith(mark)), "")


def lines_of(text: Path | bytes) -> Iterator[bytes]:
    """Yield the lines of a text as UTF-8 without a byte order mark; a line ends at a newline and nowhere else."""
    encoding = wide_encoding(text)
    with BytesIO(text) if isinstance(text, bytes) else open(text, "rb") as file:
        # Universal newlines would also end lines at \r, and change the bytes of a text.
        if encoding:
            for line in TextIOWrapper(file, encoding, errors="replace", newline="\n"):
                yield line.encode()
            return
        if file.read(len(BOM_UTF8)) != BOM_UTF8:
            file.seek(0)
        yield from file


def existing_folder(path: str | None, name: str) -> Path:
    """Return the folder that the user named for the dataset ``name``; UserError where there is none."""
    if path is None:
        raise UserError(
            f"{name} needs a folder: add dataset.path=DIR (or evaluate.dataset.path or datastore.dataset.path for other text)"
        )
    folder = local_copy(path)
    if not folder.is_dir():
        raise UserError(f"{name}: there is no folder {folder}: set dataset.path to one that exists")
    return folder
