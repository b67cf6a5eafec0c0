"""The vocabulary: symbols in order of frequency, ``<eos>`` and ``<unk>`` first."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

from trime.data.tokenizers import EOS, UNKNOWN
from trime.types import UserError


class Vocabulary:
    """Symbols and their counts in the training split; unknown symbols map to ``<unk>``."""

    def __init__(self, symbols: list[str], counts: list[int], eos: str = EOS, unknown: str = UNKNOWN):
        self.symbols, self.counts = symbols, counts
        self.index = _Index(zip(symbols, range(len(symbols)), strict=True))
        self.eos = self.index[eos]
        self.unknown = self.index.unknown = self.index[unknown]

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
        unknown += sum(counts.values()) - sum(count for _, count in kept)
        symbols = [EOS, UNKNOWN, *(symbol for symbol, _ in kept)]
        return Vocabulary(symbols, [eos, unknown, *(count for _, count in kept)])

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
