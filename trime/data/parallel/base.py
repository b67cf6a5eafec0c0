"""The interface of parallel text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


@runtime_checkable
class Parallel(Protocol):
    """Parallel text that yields the pairs of a split in the same order each time.

    ``cut``: sentences are already split into pieces; ``detokenize``: into pieces of Moses' tokens, and BLEU is of the
    detokenized text.
    """

    languages: tuple[str, str]  # source, target
    cut: bool
    detokenize: bool

    @property
    def name(self) -> str:
        """The name of the text."""

    @property
    def own(self) -> bool:
        """Whether it is a user's own text, for which nothing is published."""

    @property
    def location(self) -> Path | str:
        """Where the text lies, for messages and statistics."""

    def files(self, split: str) -> list[Path]:
        """Return the files of a split."""

    def pairs(self, split: str) -> Iterator[Pair]:
        """Yield the pairs of a split."""

    def notes(self) -> list[str]:
        """Return remarks for the statistics."""
