"""Your own text: a folder of files, split by subfolders, by ratio and seed, or by numbers of tokens; or a single file."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path

from trime.data.datasets.base import SPLITS, Dataset, Document, existing_folder, files_below, lines_of, printable
from trime.data.segments import parse_token_count
from trime.data.tokenizers import Tokenizer
from trime.errors import UserError
from trime.places import local_copy

ALIASES = {"train": ("train",), "valid": ("valid", "dev", "validation"), "test": ("test",)}  # names of a split's folder


class Folder(Dataset):
    """Files that end in ``suffix``, each a document, in ``train/ valid/ test/``, or in one folder split at random by ``seed``.

    A split may also be a single file ``train.txt``, and valid may be called dev or validation. ``ratio`` is the share of files
    for valid and for test; or ``tokens`` is the minimum number of tokens of each split, in whole files (None: all that
    remain): valid is filled first, then test, then train with the rest. If ``path`` is a file, its end is test and the part
    before it valid, by ``ratio`` of its bytes, cut between paragraphs. Without a ``name``, it is that of the folder or file.
    """

    def __init__(
        self,
        path: str | None,
        tokenizer: Tokenizer,
        name: str | None = None,
        ratio: float = 0.05,
        seed: int = 0,
        suffix: str = ".txt",
        tokens: dict[str, int | str] | None = None,
    ):
        file = local_copy(path or "")
        self.is_file = file.is_file()
        self.location = file if self.is_file else existing_folder(path, f"dataset {name or 'folder'}")
        self.name, self.own = name or printable(self.location.resolve().stem), name is None
        self.tokenizer, self.ratio, self.seed, self.suffix = tokenizer, ratio, seed, suffix
        if tokens is not None and (not isinstance(tokens, dict) or {*tokens} != {*SPLITS}):
            raise UserError(
                f"dataset {self.name}: tokens={tokens} must give a number of tokens for each of {', '.join(SPLITS)}"
            )
        self.tokens = tokens
        self.characters = tokenizer.characters

    @cached_property
    def by_split(self) -> dict[str, list[Path]]:
        """The files of each split; UserError where there are too few to split."""
        location = Path(self.location)
        if self.is_file:
            return {split: [location] for split in SPLITS}
        names = [name for split in SPLITS for name in ALIASES[split]]
        if any((location / name).is_dir() or (location / f"{name}{self.suffix}").is_file() for name in names):
            return {split: self.split_files(location, split) for split in SPLITS}
        files = files_below(location, self.suffix)
        if len(files) < 3:
            raise UserError(
                f"{self.location} holds {len(files)} {self.suffix} files: put in at least 3, or train/, valid/ and "
                "test/; a single file is split by paragraphs (dataset.path=FILE)"
            )
        random.Random(self.seed).shuffle(files)
        parts = self.split_by_tokens(files, self.tokens) if self.tokens else self.split_by_ratio(files)
        return {split: sorted(part) for split, part in zip(SPLITS, parts, strict=True)}

    def split_files(self, location: Path, split: str) -> list[Path]:
        """Return the single file or the folder's files of a split; UserError if it has several names."""
        files = {}
        for name in ALIASES[split]:
            single = location / f"{name}{self.suffix}"
            files[name] = [single] if single.is_file() else files_below(location / name, self.suffix)
        names = [name for name in files if files[name]]
        if len(names) > 1:
            raise UserError(f"{location} has both {' and '.join(names)} for {split}: leave one of them")
        return files[names[0]] if names else []

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

    def size(self, split: str) -> int:
        return sum(map(len, self.lines_of_part(split))) if self.is_file else super().size(split)

    def files(self, split: str) -> list[Path]:
        return self.by_split[split]

    def documents(self, split: str) -> Iterator[Document]:
        if self.is_file:
            yield Document(printable(Path(self.location).name), self.lines_of_part(split))
            return
        for path in self.files(split):
            yield Document(printable(str(path.relative_to(self.location))), lines_of(path))

    def lines_of_part(self, split: str) -> Iterator[bytes]:
        """Yield the lines of a split's part of a single file."""
        first, last = self.parts[split]
        yield from islice(lines_of(Path(self.location)), first, last)

    @cached_property
    def parts(self) -> dict[str, tuple[int, int]]:
        """The first line of each split's part of a single file, and the one after its last; UserError if it is too short."""
        lines = [*lines_of(Path(self.location))]
        offsets = [0, *accumulate(map(len, lines))]
        after_blank = [number for number in range(1, len(lines)) if lines[number].strip() and not lines[number - 1].strip()]
        edges = after_blank if len(after_blank) > 1 else [*range(1, len(lines))]
        if len(edges) < 2:
            raise UserError(f"{self.location} cannot be split: it needs at least 3 lines, or name a folder of files")
        starts = [offsets[edge] for edge in edges]
        valid = min(max(bisect_right(starts, (1 - 2 * self.ratio) * offsets[-1]) - 1, 0), len(edges) - 2)
        test = max(bisect_right(starts, (1 - self.ratio) * offsets[-1]) - 1, valid + 1)
        return {"train": (0, edges[valid]), "valid": (edges[valid], edges[test]), "test": (edges[test], len(lines))}
