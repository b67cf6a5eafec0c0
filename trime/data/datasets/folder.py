"""Your own text: a folder of files, split by subfolders, by ratio and seed, or by numbers of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from trime.data.datasets.base import SPLITS, Dataset, Document, existing_folder, files_below, lines_of, printable
from trime.data.segments import parse_token_count
from trime.data.tokenizers import Tokenizer
from trime.errors import UserError


class Folder(Dataset):
    """Files that end in ``suffix``, each a document, in ``train/ valid/ test/``, or in one folder split at random by ``seed``.

    A split may also be a single file ``train.txt``. ``ratio`` is the share of files for valid and for test; or ``tokens``
    is the minimum number of tokens of each split, in whole files (None: all that remain): valid is filled first, then
    test, then train with the rest.
    """

    def __init__(
        self,
        path: str | None,
        tokenizer: Tokenizer,
        name: str = "folder",
        ratio: float = 0.05,
        seed: int = 0,
        suffix: str = ".txt",
        tokens: dict[str, int | str] | None = None,
    ):
        self.location = existing_folder(path, f"dataset {name}")
        self.tokenizer, self.name, self.ratio, self.seed, self.suffix = tokenizer, name, ratio, seed, suffix
        if tokens is not None and (not isinstance(tokens, dict) or {*tokens} != {*SPLITS}):
            raise UserError(f"dataset {name}: tokens={tokens} must give a number of tokens for each of {', '.join(SPLITS)}")
        self.tokens = tokens
        self.characters = tokenizer.characters

    @cached_property
    def by_split(self) -> dict[str, list[Path]]:
        """The files of each split; UserError where there are too few to split."""
        location = Path(self.location)
        if any((location / split).is_dir() or (location / f"{split}{self.suffix}").is_file() for split in SPLITS):
            return {split: self.split_files(location, split) for split in SPLITS}
        files = files_below(location, self.suffix)
        if len(files) < 3:
            raise UserError(
                f"{self.location} holds {len(files)} {self.suffix} files: put in at least 3, or train/, valid/ and test/"
            )
        random.Random(self.seed).shuffle(files)
        parts = self.split_by_tokens(files, self.tokens) if self.tokens else self.split_by_ratio(files)
        return {split: sorted(part) for split, part in zip(SPLITS, parts, strict=True)}

    def split_files(self, location: Path, split: str) -> list[Path]:
        """Return the single file or the folder's files of a split."""
        single = location / f"{split}{self.suffix}"
        return [single] if single.is_file() else files_below(location / split, self.suffix)

    def split_by_ratio(self, files: list[Path]) -> tuple[list[Path], list[Path], list[Path]]:
        """Return the files of train, valid and test by ``ratio``."""
        held_out = max(1, round(self.ratio * len(files)))
        return files[2 * held_out :], files[:held_out], files[held_out : 2 * held_out]

    def split_by_tokens(self, files: list[Path], tokens: dict[str, int | str]) -> tuple[list[Path], list[Path], list[Path]]:
        """Return the files of train, valid and test by ``tokens``; UserError where none remain for train."""
        remaining = iter(files)
        valid, test, train = (
            self.take_files(remaining, parse_token_count(tokens[split])) for split in ("valid", "test", "train")
        )
        if not train:
            raise UserError(f"{self.location} has no files left for train: lower dataset.tokens.valid and .test")
        return train, valid, test

    def take_files(self, files: Iterator[Path], tokens: int | None) -> list[Path]:
        """Take the next files until they have so many tokens; None: all that remain."""
        if tokens is None:
            return [*files]
        taken: list[Path] = []
        while tokens > 0 and (path := next(files, None)):
            taken.append(path)
            tokens -= sum(map(len, self.tokenizer.tokens(lines_of(path))))
        return taken

    def files(self, split: str) -> list[Path]:
        return self.by_split[split]

    def documents(self, split: str) -> Iterator[Document]:
        for path in self.files(split):
            yield Document(printable(str(path.relative_to(self.location))), lines_of(path))
