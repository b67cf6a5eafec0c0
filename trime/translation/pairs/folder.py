"""Your own parallel text: two files per split, aligned line by line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from trime.data.datasets.base import existing_folder, lines_of, printable
from trime.errors import UserError
from trime.translation.pairs.base import Pair


class ParallelFolder:
    """Files ``train.de``, ``train.en`` and so on in a folder; valid may be called val or dev.

    Training pairs are left out where a side has more than ``max_words`` words, or more than ``ratio`` times as many as the
    other. ``cut``: sentences are already split into pieces, with @@ where a word continues. ``detokenize``: the pieces are
    of Moses' tokens, which are detokenized before BLEU is computed.
    """

    names: ClassVar[dict[str, tuple[str, ...]]] = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}

    def __init__(
        self,
        path: str | None,
        source: str,
        target: str,
        name: str | None = None,
        max_words: int = 175,
        ratio: float | None = None,
        cut: bool = False,
        detokenize: bool = False,
    ):
        self.path, self.languages, self.given_name, self.own = path, (source, target), name, name is None
        self.max_words, self.ratio, self.cut, self.detokenize = max_words, ratio, cut, detokenize

    @property
    def name(self) -> str:
        return self.given_name or printable(self.location.resolve().stem)

    @property
    def location(self) -> Path:
        """The folder; UserError where it does not exist."""
        return existing_folder(self.path, f"dataset {self.given_name or 'parallel'}")

    def files(self, split: str) -> list[Path]:
        """Return both files of a split, or none; UserError where one is missing, or both of train."""
        paths = []
        for language in self.languages:
            candidates = (self.location / f"{name}.{language}" for name in self.names[split])
            paths += [path for path in candidates if path.is_file()][:1]
        if len(paths) < 2 and (split == "train" or paths):
            names = " and ".join(f"{self.names[split][0]}.{language}" for language in self.languages)
            raise UserError(f"{self.location} does not hold both {names}: put them there, one sentence per line")
        return paths

    def pairs(self, split: str) -> Iterator[Pair]:
        """Yield the pairs that are not empty; UserError where files differ in length or one side of a test pair is empty."""
        source, target = self.files(split)
        for number, (left, right) in enumerate(zip_longest(decoded_lines(source), decoded_lines(target)), 1):
            if left is None or right is None:
                raise UserError(f"{source} and {target} have different numbers of lines: line {number} is in only one of them")
            pair = Pair(left.strip(), right.strip())
            if split != "train" and any(pair) and not all(pair):
                file = target if pair.source else source
                raise UserError(f"line {number} of {file} is empty: BLEU is of all sentences, correct both files")
            if all(pair) and (split != "train" or self.fits(pair)):
                yield pair

    def notes(self) -> list[str]:
        return []

    def fits(self, pair: Pair) -> bool:
        """Return True if a pair is within the limits on length."""
        short, long = sorted(len(side.split()) for side in pair)
        return long <= self.max_words and (self.ratio is None or long <= self.ratio * short)


def decoded_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text; UserError where it is not UTF-8."""
    for number, line in enumerate(lines_of(file), 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file} is not UTF-8 in line {number} ({error.reason}): iconv -f latin1 -t utf-8 converts it"
            ) from None
