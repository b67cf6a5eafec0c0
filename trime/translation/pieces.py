"""Pieces of both languages: byte pairs that they share (Sennrich et al. 2016), or text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers

from trime.data.byte_pairs import LearnedPieces
from trime.data.tokenizers import EOS, UNKNOWN, Whitespace
from trime.errors import UserError, install_command


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
