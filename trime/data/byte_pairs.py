"""Byte pairs learned from the training text (Sennrich et al. 2016) by the tokenizers library, and text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from trime.data.tokenizers import EOS
from trime.errors import UserError

LONG = re.compile(r"\S{256}(?=\S)")


class LearnedPieces:
    """Text in pieces that a tokenizers.Tokenizer has learned."""

    characters = False
    pieces: Any

    def save(self, path: Path) -> None:
        self.pieces.save(str(path))

    def text(self, symbols: list[str]) -> str:
        return str(self.pieces.decoder.decode([symbol for symbol in symbols if symbol != EOS]))


class BytePairs(LearnedPieces):
    """Pieces of bytes, as many as ``vocabulary.max_size``; nothing is unknown, and ``<eos>`` only precedes a document."""

    def __init__(self) -> None:
        # The file of the pieces, once a text was prepared: they are learned then.
        self.saved: Callable[[], Path] | None = None

    @cached_property
    def pieces(self) -> Any:
        """The trained tokenizers.Tokenizer; UserError if there is none yet."""
        if self.saved is None:
            raise UserError("byte pairs are learned from the training text: they cannot count tokens before (dataset.tokens)")
        return tokenizers.Tokenizer.from_file(str(self.saved()))

    def train(self, lines: Iterable[bytes], size: int | None, min_count: int) -> None:
        """Learn ``size`` pieces from text; those of pairs that occur less than ``min_count`` times are left out."""
        if size is None or size < 300:
            raise UserError(f"vocabulary.max_size={size}: byte pairs need a number of pieces, at least 300")
        texts = (line.decode("utf-8", "replace") for line in lines)
        self.pieces = train_pieces(texts, size - 2, min_frequency=min_count)

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            yield self.pieces.encode(line.decode("utf-8", "replace")).tokens


def train_pieces(texts: Iterable[str], size: int, **options: Any) -> Any:
    """Return a tokenizers.Tokenizer of at most ``size`` pieces, all bytes included; ``options`` are those of its trainer."""
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, **options)
    # Training takes time quadratic in the length of a word, and a script without spaces has words of any length.
    pieces.train_from_iterator((LONG.sub(r"\g<0>\n", text) for text in texts), trainer)
    return pieces
