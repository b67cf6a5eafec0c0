"""The vocabulary: symbols in order of frequency, ``<eos>`` and ``<unk>`` first, or as fairseq's dictionaries have it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from trime.data.tokenizers import EOS, UNKNOWN
from trime.types import UserError

FAIRSEQ = ["<s>", "<pad>", "</s>", UNKNOWN]  # the first four of every fairseq dictionary
PAD = 1
MULTIPLE = 8  # fairseq fills a dictionary up to a multiple of it


class Ends(NamedTuple):
    """The ids that stand before a document's first token and behind a row's last one."""

    eos: int
    pad: int


class Vocabulary:
    """Symbols and their counts in the training split; unknown symbols map to ``<unk>``.

    ``eos`` and ``unknown`` name the symbols that end a line and stand for the rest. Rows are filled with
    fairseq's ``<pad>``, and in a vocabulary of our own with ``<eos>``.
    """

    def __init__(self, symbols: list[str], counts: list[int], eos: str = EOS, unknown: str = UNKNOWN):
        self.symbols, self.counts = symbols, counts
        self.index = _Index(zip(symbols, range(len(symbols)), strict=True))
        self.eos = self.index[EOS] = self.index[eos]
        self.unknown = self.index.unknown = self.index[unknown]
        self.ends = Ends(self.eos, PAD if symbols[: len(FAIRSEQ)] == FAIRSEQ else self.eos)

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def fingerprint(self) -> str:
        """Names the vocabulary: models and datastores carry it."""
        return hashlib.sha256("\0".join(self.symbols).encode()).hexdigest()[:16]

    @staticmethod
    def of_counts(counts: Counter[str], limit: int | None, minimum: int) -> Vocabulary:
        """The ``limit`` most frequent symbols that occur at least ``minimum`` times; ties by the symbol."""
        eos, unknown = counts.pop(EOS, 0), counts.pop(UNKNOWN, 0)
        ranked = sorted(((s, c) for s, c in counts.items() if c >= minimum), key=lambda pair: (-pair[1], pair[0]))
        kept = ranked if limit is None else ranked[: max(limit - 2, 0)]
        if not kept:
            raise UserError(f"no symbol occurs {minimum} times: lower vocabulary.minimum, or train on more text")
        unknown += sum(counts.values()) - sum(count for _, count in kept)
        symbols = [EOS, UNKNOWN, *(symbol for symbol, _ in kept)]
        return Vocabulary(symbols, [eos, unknown, *(count for _, count in kept)])

    @staticmethod
    def of_fairseq(words: list[tuple[str, int]], eos: int = 0, unknown: int = 0) -> Vocabulary:
        """The four special symbols, then words with their counts as a ``dict.txt`` lists them."""
        counts = [0, 0, eos, unknown, *(count for _, count in words)]
        return Vocabulary([*FAIRSEQ, *(word for word, _ in words)], counts, FAIRSEQ[2])

    @staticmethod
    def as_published(counts: Counter[str], limit: int | None, minimum: int) -> Vocabulary:
        """As fairseq's preprocessing makes it: filled up with made-up words to a multiple of 8."""
        plain = Vocabulary.of_counts(counts, limit, minimum)
        words = list(zip(plain.symbols, plain.counts, strict=True))[2:]
        missing = -(len(FAIRSEQ) + len(words)) % MULTIPLE
        words += [(f"madeupword{number:04d}", 0) for number in range(missing)]
        return Vocabulary.of_fairseq(words, *plain.counts[:2])

    @staticmethod
    def of_dictionary(path: Path) -> Vocabulary:
        """A fairseq ``dict.txt``: a symbol and its count a line, from id 4 on."""
        try:
            pairs = [line.rsplit(" ", 1) for line in path.read_text("utf-8").splitlines()]
            return Vocabulary.of_fairseq([(symbol, int(count)) for symbol, count in pairs])
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is no fairseq dictionary ({error}): name the dict.txt of the checkpoint") from None

    def save(self, path: Path) -> None:
        content = {"eos": self.symbols[self.eos], "unknown": self.symbols[self.unknown]}
        path.write_text(json.dumps({**content, "symbols": self.symbols, "counts": self.counts}))

    @staticmethod
    def load(path: Path) -> Vocabulary:
        try:
            return Vocabulary(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} is no readable vocabulary ({error}): delete its folder and run stage prepare") from None


class _Index(dict[str, int]):
    """Symbol to id, ``unknown`` for the rest."""

    unknown = 0

    def __missing__(self, symbol: str) -> int:
        return self.unknown
