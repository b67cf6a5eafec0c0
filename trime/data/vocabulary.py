"""Vocabularies: symbols in order of frequency after ``<eos>`` and ``<unk>``, or as in fairseq's dictionaries."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from trime.data.tokenizers import EOS, UNKNOWN
from trime.errors import UserError

FAIRSEQ = ["<s>", "<pad>", "</s>", UNKNOWN]  # the first four symbols of every fairseq dictionary
PAD = 1
OVERWRITE = " #fairseq:overwrite"  # after a count in a dictionary
MULTIPLE = 8  # fairseq pads the size of a dictionary to a multiple of this


class SpecialIds(NamedTuple):
    """The id before a document's first token, and the id that pads a row."""

    eos: int
    pad: int


class SymbolIndex(dict[str, int]):
    """A map from symbols to ids, with the id ``unknown`` for symbols that are not in it."""

    unknown = 0

    def __missing__(self, symbol: str) -> int:
        return self.unknown


class Vocabulary:
    """Symbols and their counts in the training split; unknown symbols map to ``<unk>``.

    ``eos`` and ``unknown`` are the names of these symbols. Rows are padded with fairseq's ``<pad>``, or with ``<eos>``
    in a vocabulary of our own.
    """

    def __init__(self, symbols: list[str], counts: list[int], eos: str = EOS, unknown: str = UNKNOWN):
        self.symbols, self.counts = symbols, counts
        self.index = SymbolIndex(zip(symbols, range(len(symbols)), strict=True))
        self.eos = self.index[EOS] = symbols.index(eos)  # a word of the text may be written alike: its id is a later one
        self.unknown = self.index.unknown = symbols.index(unknown)
        self.special_ids = SpecialIds(self.eos, PAD if symbols[: len(FAIRSEQ)] == FAIRSEQ else self.eos)

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the symbols, which models and datastores record."""
        return hashlib.sha256("\0".join(self.symbols).encode()).hexdigest()[:16]

    @staticmethod
    def from_counts(counts: Counter[str], limit: int | None, minimum: int) -> Vocabulary:
        """Take the ``limit`` most frequent symbols that occur ``minimum`` times, ties by alphabet; UserError without any."""
        eos, unknown = counts.pop(EOS, 0), counts.pop(UNKNOWN, 0)
        ranked = sorted(((s, c) for s, c in counts.items() if c >= minimum), key=lambda pair: (-pair[1], pair[0]))
        chosen = ranked if limit is None else ranked[: max(limit - 2, 0)]
        if not chosen:
            raise UserError(
                f"no symbol occurs {minimum} times: lower vocabulary.min_count, train on more text, or take "
                "dataset=folder (byte pairs) for a script without spaces between words"
            )
        unknown += sum(counts.values()) - sum(count for _, count in chosen)
        symbols = [EOS, UNKNOWN, *(symbol for symbol, _ in chosen)]
        return Vocabulary(symbols, [eos, unknown, *(count for _, count in chosen)])

    @staticmethod
    def fairseq_from_counts(counts: Counter[str], limit: int | None, minimum: int) -> Vocabulary:
        """Build a dictionary as fairseq's preprocessing does, padded with made-up words to a multiple of 8."""
        plain = Vocabulary.from_counts(counts, limit, minimum)
        missing = -(len(FAIRSEQ) + len(plain) - 2) % MULTIPLE
        symbols = [*FAIRSEQ, *plain.symbols[2:], *(f"madeupword{number:04d}" for number in range(missing))]
        return Vocabulary(symbols, [0, 0, *plain.counts, *([0] * missing)], FAIRSEQ[2])

    @staticmethod
    def from_dictionary(path: Path) -> Vocabulary:
        """Read a fairseq ``dict.txt``, with a symbol and its count per line from id 4 on; UserError where it is invalid."""
        symbols, counts, known = [*FAIRSEQ], [0] * len(FAIRSEQ), {*FAIRSEQ}
        try:
            for line in open(path, encoding="utf-8"):  # unlike str.splitlines, which also splits at separators in symbols
                entry = line.rstrip().removesuffix(OVERWRITE)
                symbol, count = entry.rsplit(" ", 1)
                # With #fairseq:overwrite a symbol may come again: text then gets the id of the later line.
                if symbol in known and not line.rstrip().endswith(OVERWRITE):
                    raise ValueError(f"it has {symbol!r} twice, and no{OVERWRITE} behind the second")
                known.add(symbol)
                symbols.append(symbol)
                counts.append(int(count))
            return Vocabulary(symbols, counts, FAIRSEQ[2])
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not a fairseq dictionary ({error}): name the dict.txt of the checkpoint") from None

    def save(self, path: Path) -> None:
        content = {"eos": self.symbols[self.eos], "unknown": self.symbols[self.unknown]}
        path.write_text(json.dumps({**content, "symbols": self.symbols, "counts": self.counts}))

    @staticmethod
    def load(path: Path) -> Vocabulary:
        """Read a saved vocabulary; UserError where it cannot be read."""
        try:
            return Vocabulary(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} is not a readable vocabulary ({error}): delete its folder and run stage prepare") from None
