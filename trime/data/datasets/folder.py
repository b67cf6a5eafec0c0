"""One's own text: a folder of .txt files, split by folders or by ratio and seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from trime.data.datasets.base import SPLITS, Dataset, Document, existing_folder, lines_of
from trime.data.tokenizers import ByteNumbers, Bytes, Tokenizer
from trime.types import UserError


class Folder(Dataset):
    """``train/ valid/ test/`` of .txt files, one file a document; or one folder, split by ``ratio`` and ``seed``.

    A split may also be a single file ``train.txt``. ``ratio`` is the share of files for valid and for test.
    """

    def __init__(self, path: str | None, tokenizer: Tokenizer, name: str = "folder", ratio: float = 0.05, seed: int = 0):
        self.place = existing_folder(path, f"dataset {name}")
        self.tokenizer, self.name, self.ratio, self.seed = tokenizer, name, ratio, seed
        self.characters = isinstance(tokenizer, Bytes | ByteNumbers)

    @cached_property
    def by_split(self) -> dict[str, list[Path]]:
        place = Path(self.place)
        if any((place / split).is_dir() or (place / f"{split}.txt").is_file() for split in SPLITS):
            return {split: self.named(place, split) for split in SPLITS}
        return self.drawn(sorted(place.rglob("*.txt")))

    @staticmethod
    def named(place: Path, split: str) -> list[Path]:
        single = place / f"{split}.txt"
        return [single] if single.is_file() else sorted((place / split).rglob("*.txt"))

    def drawn(self, files: list[Path]) -> dict[str, list[Path]]:
        held_out = max(1, round(self.ratio * len(files)))
        if len(files) < 3:
            raise UserError(f"{self.place} holds {len(files)} .txt files: put in at least 3, or train/, valid/ and test/")
        random.Random(self.seed).shuffle(files)
        parts = files[2 * held_out :], files[:held_out], files[held_out : 2 * held_out]
        return {split: sorted(part) for split, part in zip(SPLITS, parts, strict=True)}

    def files(self, split: str) -> list[Path]:
        return self.by_split[split]

    def documents(self, split: str) -> Iterator[Document]:
        for path in self.files(split):
            yield Document(path.name, lines_of(path))
