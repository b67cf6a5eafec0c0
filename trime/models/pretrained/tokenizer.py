"""Tokenizers in the transformers format: a model's own, or one of words made here from text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trime.models.pretrained.loading import check_version, refusal
from trime.types import UserError

UNKNOWN, PADDING, END = "<unk>", "<pad>", "</s>"


def load_tokenizer(name: str) -> Any:
    """A model's tokenizer; UserError where it has none, or none that ends a text."""
    check_version()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise refusal(name, "has no tokenizer in the transformers format", error) from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.name={name}: its tokenizer has no end-of-text token, at which an answer would stop")
    return tokenizer


def word_level(texts: Iterable[str], limit: int, folder: Path) -> Any:
    """The ``limit`` most frequent words and marks of the texts; saved in ``folder``."""
    check_version()
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=limit, special_tokens=[PADDING, END, UNKNOWN]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=UNKNOWN, pad_token=PADDING, eos_token=END)
    tokenizer.save_pretrained(folder)
    return tokenizer


def byte_pairs(texts: Iterable[str], limit: int, folder: Path) -> Any:
    """The ``limit`` most frequent byte pairs of the texts, all bytes among them; saved in ``folder``."""
    check_version()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=limit, special_tokens=[PADDING, END], initial_alphabet=alphabet, show_progress=False
    )
    pairs.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, pad_token=PADDING, eos_token=END)
    tokenizer.save_pretrained(folder)
    return tokenizer


def encoded(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text alone, without those that a model's tokenizer adds."""
    return tokenizer(text, add_special_tokens=False).input_ids


def prompted(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a prompt, with those that a model's tokenizer adds: a start before it (Llama), an end behind it (T5)."""
    return tokenizer(text).input_ids


class Pieces:
    """A model's tokenizer for running text, without special tokens; ``start`` stands before a document's first piece.

    Lines go in together, as many as ``size`` bytes, so that pieces may reach over their ends.
    """

    def __init__(self, name: str, size: int = 2**20):
        self.tokenizer, self.size = load_tokenizer(name), size
        found = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        self.symbols = [f"<none {number}>" if piece is None else piece for number, piece in enumerate(found)]
        self.start: str = self.tokenizer.bos_token or self.tokenizer.eos_token
        self.unknown: str = self.tokenizer.unk_token or self.start

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        """The pieces of a document."""
        held, size = [], 0
        for line in lines:
            held.append(line)
            size += len(line)
            if size >= self.size:
                yield self.cut(held)
                held, size = [], 0
        if held:
            yield self.cut(held)

    def text(self, symbols: list[str]) -> str:
        """Pieces as text again."""
        return self.tokenizer.convert_tokens_to_string(symbols)

    def cut(self, lines: list[bytes]) -> list[str]:
        """The pieces of some lines."""
        ids = encoded(self.tokenizer, b"".join(lines).decode("utf-8", "replace"))
        return [self.symbols[number] for number in ids]
