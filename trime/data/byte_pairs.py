"""Byte pairs learned from the training text (Sennrich et al. 2016) by the tokenizers library, and text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers

from trime.data.tokenizers import EOS, UNKNOWN, Whitespace
from trime.errors import UserError, install_command

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
        # Where the pieces are, once a text was prepared: they are learned then.
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


class JointBPE(LearnedPieces):
    """A byte-pair tokenizer shared by both languages; a word's first piece begins with a marker for the space."""

    def __init__(self, pieces: Any):
        if find_spec("sacrebleu") is None:  # refused before the text is prepared, not when BLEU is computed hours later
            raise UserError(f"translation needs the package sacrebleu: {install_command('mt')}")
        self.pieces = pieces  # a tokenizers.Tokenizer
        pieces.encode_special_tokens = True  # "<unk>" in a sentence is text

    @classmethod
    def train(cls, texts: Iterable[str], limit: int) -> JointBPE:
        """Train on texts, with at most ``limit`` pieces; punctuation is split off."""
        pieces = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=UNKNOWN))
        splits = tokenizers.pre_tokenizers
        pieces.pre_tokenizer = splits.Sequence([splits.Metaspace(), splits.Punctuation()])
        pieces.decoder = tokenizers.decoders.Metaspace()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=limit, special_tokens=[UNKNOWN], show_progress=False)
        pieces.train_from_iterator(texts, trainer)
        return cls(pieces)

    @classmethod
    def load(cls, file: Path) -> JointBPE:
        return cls(tokenizers.Tokenizer.from_file(str(file)))

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            yield [*self.pieces.encode(line.decode("utf-8", "replace")).tokens, EOS]


class PresegmentedText(Whitespace):
    """A tokenizer for text that is already split into pieces by subword-nmt, with @@ where a word continues.

    ``moses`` is the language of the Moses detokenizer for the words (fairseq's ``--tokenizer moses``); None: no detokenizer.
    """

    def __init__(self, moses: str | None = None):
        self.detokenizer = None
        if moses is not None:
            if find_spec("sacremoses") is None:
                raise UserError(f"dataset.detokenize=true needs sacremoses: {install_command('mt')}")
            from sacremoses import MosesDetokenizer

            self.detokenizer = MosesDetokenizer(lang=moses)

    def text(self, symbols: list[str]) -> str:
        words = re.sub(r"@@( |$)", "", " ".join(symbol for symbol in symbols if symbol != EOS))
        return words if self.detokenizer is None else self.detokenizer.detokenize(words.split())
