"""The interface of parallel text, and one of its languages as a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from trime.data.datasets.base import Dataset, Document
from trime.data.tokenizers import Tokenizer


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


@runtime_checkable
class Parallel(Protocol):
    """Parallel text that yields the pairs of a split in the same order each time."""

    name: str
    location: Path | str  # where it lies, for messages and statistics
    languages: tuple[str, str]  # source, target
    own: bool  # a user's own text, for which nothing is published
    cut: bool  # sentences are already split into pieces
    detokenize: bool  # into pieces of Moses' tokens: BLEU is of the detokenized text

    def files(self, split: str) -> list[Path]:
        """Return the files of a split."""

    def pairs(self, split: str) -> Iterator[Pair]:
        """Yield the pairs of a split."""

    def notes(self) -> list[str]:
        """Return remarks for the statistics."""


class Side(Dataset):
    """One language of a parallel text (0: source, 1: target) as a dataset; each sentence is a document of one line."""

    def __init__(self, text: Parallel, side: int, tokenizer: Tokenizer):
        self.text, self.side, self.tokenizer = text, side, tokenizer
        self.name, self.location, self.own = text.name, text.location, text.own

    def files(self, split: str) -> list[Path]:
        return self.text.files(split)

    def size(self, split: str) -> int:
        return sum(path.stat().st_size for path in self.files(split)[self.side :][:1])

    def documents(self, split: str) -> Iterator[Document]:
        for number, pair in enumerate(self.text.pairs(split), 1):
            yield Document(f"sentence {number}", [pair[self.side].encode()])

    def notes(self) -> list[str]:
        return self.text.notes()
