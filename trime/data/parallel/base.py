"""What parallel text is, and one's own: two files a split, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from trime.data.datasets.base import SPLITS, existing_folder
from trime.types import UserError


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


@runtime_checkable
class Parallel(Protocol):
    """Pairs of each split, the same ones in the same order each time.

    ``cut``: sentences are pieces already; ``detokenize``: of Moses' tokens, and BLEU is of the text that those make up.
    """

    name: str
    languages: tuple[str, str]  # source, target
    cut: bool
    detokenize: bool

    @property
    def place(self) -> Path | str: ...

    def files(self, split: str) -> list[Path]:
        """The files of a split."""

    def pairs(self, split: str) -> Iterator[Pair]: ...

    def notes(self) -> list[str]:
        """What a reader of the statistics should know."""


class Lines:
    """Files ``train.de``, ``train.en`` and so on of a folder; valid may be called val or dev.

    Of the training pairs those are left out of which a side has more than ``longest`` words, or ``ratio`` times as
    many as the other. ``cut``: sentences are pieces already, their ends marked @@ where a word goes on. ``detokenize``: the
    pieces are of Moses' tokens, which its detokenizer makes text of again before BLEU is counted.
    """

    names: ClassVar[dict[str, tuple[str, ...]]] = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}

    def __init__(
        self,
        path: str | None,
        source: str,
        target: str,
        name: str = "parallel",
        longest: int = 175,
        ratio: float | None = None,
        cut: bool = False,
        detokenize: bool = False,
    ):
        self.path, self.languages, self.name, self.cut = path, (source, target), name, cut
        self.longest, self.ratio, self.detokenize = longest, ratio, detokenize

    @property
    def place(self) -> Path:
        """The folder."""
        return existing_folder(self.path, f"dataset {self.name}")

    def files(self, split: str) -> list[Path]:
        """Both files of a split; none where one is missing, which training cannot do without."""
        found = [self.file(split, language) for language in self.languages]
        if all(found):
            return [path for path in found if path]
        if split == "train" or any(found):
            wanted = " and ".join(f"{self.names[split][0]}.{language}" for language in self.languages)
            raise UserError(f"{self.place} does not hold both {wanted}: put them there, a sentence a line")
        return []

    def file(self, split: str, language: str) -> Path | None:
        """A split in a language, if it is there."""
        candidates = (self.place / f"{name}.{language}" for name in self.names[split])
        return next((path for path in candidates if path.is_file()), None)

    def pairs(self, split: str) -> Iterator[Pair]:
        """Lines side by side, without empty ones; beyond the training split no side may be empty alone."""
        source, target = self.files(split)
        for number, (left, right) in enumerate(zip_longest(lines_of(source), lines_of(target)), 1):
            if left is None or right is None:
                raise UserError(f"{source} and {target} have not the same number of lines: line {number} is in one alone")
            pair = Pair(left.strip(), right.strip())
            if split != "train" and any(pair) and not all(pair):
                raise UserError(
                    f"line {number} of {target if pair.source else source} is empty: BLEU is of all sentences; mend both"
                )
            if all(pair) and (split != "train" or self.fits(pair)):
                yield pair

    def notes(self) -> list[str]:
        """Nothing."""
        return []

    def fits(self, pair: Pair) -> bool:
        """Whether a pair is one to learn from."""
        short, long = sorted(len(side.split()) for side in pair)
        return long <= self.longest and (self.ratio is None or long <= self.ratio * short)


def lines_of(file: Path) -> Iterator[str]:
    """The lines of a text in UTF-8."""
    with open(file, encoding="utf-8") as lines:
        try:
            yield from lines
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 ({error.reason}): iconv -f latin1 -t utf-8 converts it") from None


__all__ = ["SPLITS", "Lines", "Pair", "Parallel"]
