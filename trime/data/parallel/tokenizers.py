"""Tokenizers of parallel text: byte pairs that both languages share, and text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trime.data.tokenizers import EOS, UNKNOWN, words_of
from trime.errors import UserError, install_command


def require_packages() -> None:
    """Raise UserError if a package that translation needs is not installed."""
    for package in ("tokenizers", "sacrebleu"):
        if find_spec(package) is None:
            raise UserError(f"translation needs {package}: {install_command('mt')}")


class PresegmentedText:
    """A tokenizer for text that is already split into pieces by subword-nmt, with @@ where a word continues.

    ``moses`` is the language of the Moses detokenizer for the words (fairseq's ``--tokenizer moses``); None: no detokenizer.
    """

    characters = False

    def __init__(self, moses: str | None = None):
        self.detokenizer = None if moses is None else detokenizer(moses)

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            yield [*words_of(line), EOS]

    def text(self, symbols: list[str]) -> str:
        words = re.sub(r"@@( |$)", "", " ".join(symbol for symbol in symbols if symbol != EOS))
        return words if self.detokenizer is None else self.detokenizer.detokenize(words.split())


def detokenizer(language: str) -> Any:
    """Return Moses' detokenizer of a language; UserError where sacremoses is not installed."""
    if find_spec("sacremoses") is None:
        raise UserError(f"dataset.detokenize=true needs sacremoses: {install_command('mt')}")
    from sacremoses import MosesDetokenizer

    return MosesDetokenizer(lang=language)


class JointBPE:
    """A byte-pair tokenizer shared by both languages; a word's first piece begins with a marker for the space."""

    characters = False

    def __init__(self, pieces: Any):
        self.pieces = pieces  # a tokenizers.Tokenizer
        pieces.encode_special_tokens = True  # "<unk>" in a sentence is text

    @classmethod
    def train(cls, texts: Iterable[str], limit: int) -> JointBPE:
        """Train on texts, with at most ``limit`` pieces; punctuation is split off."""
        require_packages()
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        pieces = Tokenizer(models.BPE(unk_token=UNKNOWN))
        pieces.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
        pieces.decoder = decoders.Metaspace()
        pieces.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=limit, special_tokens=[UNKNOWN], show_progress=False))
        return cls(pieces)

    @classmethod
    def load(cls, file: Path) -> JointBPE:
        """Load the tokenizer of a prepared text."""
        require_packages()
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(file)))

    def save(self, file: Path) -> None:
        """Write the tokenizer as a JSON file."""
        self.pieces.save(str(file))

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            yield [*self.pieces.encode(line.decode("utf-8", "replace")).tokens, EOS]

    def text(self, symbols: list[str]) -> str:
        return self.pieces.decoder.decode([symbol for symbol in symbols if symbol != EOS])
