"""One's own text: a folder of files, split by folders, by ratio and seed, or by numbers of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from trime.data.datasets.base import SPLITS, Dataset, Document, existing_folder, lines_of
from trime.data.segments import count_of
from trime.data.tokenizers import ByteNumbers, Bytes, Tokenizer
from trime.types import UserError


class Folder(Dataset):
    """``train/ valid/ test/`` of files that end in ``suffix``, one file a document; or one folder, split at random by ``seed``.

    A split may also be a single file ``train.txt``. ``ratio`` is the share of files for valid and for test; or ``tokens``
    says how many tokens of each split whole files shall have at least (null: all that are left): valid is filled first, then
    test, then train with what there is.
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
        self.place = existing_folder(path, f"dataset {name}")
        self.tokenizer, self.name, self.ratio, self.seed, self.suffix = tokenizer, name, ratio, seed, suffix
        if tokens is not None and (not isinstance(tokens, dict) or {*tokens} != {*SPLITS}):
            raise UserError(f"dataset {name}: tokens={tokens} names the tokens of {', '.join(SPLITS)}")
        self.tokens = tokens
        self.characters = isinstance(tokenizer, Bytes | ByteNumbers)

    @cached_property
    def by_split(self) -> dict[str, list[Path]]:
        place = Path(self.place)
        if any((place / split).is_dir() or (place / f"{split}{self.suffix}").is_file() for split in SPLITS):
            return {split: self.named(place, split) for split in SPLITS}
        files = sorted(place.rglob(f"*{self.suffix}"))
        if len(files) < 3:
            raise UserError(
                f"{self.place} holds {len(files)} {self.suffix} files: put in at least 3, or train/, valid/ and test/"
            )
        random.Random(self.seed).shuffle(files)
        parts = self.filled(files, self.tokens) if self.tokens else self.shared_out(files)
        return {split: sorted(part) for split, part in zip(SPLITS, parts, strict=True)}

    def named(self, place: Path, split: str) -> list[Path]:
        single = place / f"{split}{self.suffix}"
        return [single] if single.is_file() else sorted((place / split).rglob(f"*{self.suffix}"))

    def shared_out(self, files: list[Path]) -> tuple[list[Path], list[Path], list[Path]]:
        held_out = max(1, round(self.ratio * len(files)))
        return files[2 * held_out :], files[:held_out], files[held_out : 2 * held_out]

    def filled(self, files: list[Path], tokens: dict[str, int | str]) -> tuple[list[Path], list[Path], list[Path]]:
        left = iter(files)
        valid, test, train = (self.taken(left, count_of(tokens[split])) for split in ("valid", "test", "train"))
        if not train:
            raise UserError(f"{self.place} holds no more than valid and test ask for: lower dataset.tokens.valid and .test")
        return train, valid, test

    def taken(self, files: Iterator[Path], wanted: int | None) -> list[Path]:
        """The next files, until they have as many tokens; null: all that are left."""
        if wanted is None:
            return [*files]
        found: list[Path] = []
        while wanted > 0 and (path := next(files, None)):
            found.append(path)
            wanted -= sum(map(len, self.tokenizer.tokens(lines_of(path))))
        return found

    def files(self, split: str) -> list[Path]:
        return self.by_split[split]

    def documents(self, split: str) -> Iterator[Document]:
        for path in self.files(split):
            yield Document(str(path.relative_to(self.place)), lines_of(path))
