"""enwik8 (Mahoney 2009): the first 10^8 bytes of a Wikipedia dump, split 90M/5M/5M."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from trime.common.urls import local_copy
from trime.data.datasets.base import Dataset, Document
from trime.data.datasets.download import fetch_folder
from trime.data.tokenizers import Tokenizer
from trime.errors import UserError

DIGEST = "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"  # of enwik8.zip
ARCHIVE_SOURCES = ["https://mattmahoney.net/dc/enwik8.zip", "https://data.deepai.org/enwik8.zip"]


class Enwik8(Dataset):
    """One document per split, one token per byte. ``path`` is the file ``enwik8`` or its folder.

    A shorter file is split in the same proportion, 90:5:5.
    """

    name = "enwik8"
    characters = True
    published: ClassVar[dict[str, int]] = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
    count_difference_reason = "the file is not the published enwik8 of 100,000,000 bytes"

    def __init__(self, cache: str, tokenizer: Tokenizer, path: str | None = None):
        self.path, self.cache, self.tokenizer = path, Path(cache), tokenizer

    @cached_property
    def location(self) -> Path:  # type: ignore[override]
        if self.path is not None:
            path = local_copy(self.path)
            file = path / "enwik8" if path.is_dir() else path
            if not file.is_file():
                raise UserError(f"dataset enwik8: there is no file {file}: set dataset.path to it")
            return file
        return fetch_folder(ARCHIVE_SOURCES, DIGEST, self.cache / "enwik8.zip", self.cache / "enwik8") / "enwik8"

    def bounds(self, split: str) -> tuple[int, int]:
        """Return the first byte of a split and the one after its last."""
        size = self.location.stat().st_size
        first, end = {"train": (0, 90), "valid": (90, 95), "test": (95, 100)}[split]
        return first * size // 100, end * size // 100

    def files(self, split: str) -> list[Path]:
        return [self.location]

    def size(self, split: str) -> int:
        start, end = self.bounds(split)
        return end - start

    def documents(self, split: str) -> Iterator[Document]:
        yield Document(split, self.blocks(split))

    def blocks(self, split: str) -> Iterator[bytes]:
        start, end = self.bounds(split)
        with open(self.location, "rb") as file:
            file.seek(start)
            while start < end and (block := file.read(min(2**20, end - start))):
                start += len(block)
                yield block
