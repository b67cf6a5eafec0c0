"""One language of a parallel text as a dataset of sentences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trime.data.datasets.base import SPLITS, Dataset, Document
from trime.data.parallel.base import Parallel
from trime.data.tokenizers import Tokenizer


class Side(Dataset):
    """The sentences of one language (0: source, 1: target), each a document of one line."""

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


def sentences(text: Parallel, split: str) -> Iterator[str]:
    """Yield the sentences of both languages, pair by pair."""
    for pair in text.pairs(split):
        yield from pair


def available_splits(text: Parallel) -> list[str]:
    """Return the splits that have files."""
    return [split for split in SPLITS if text.files(split)]
