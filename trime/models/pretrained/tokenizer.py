"""Tokenizers in the transformers format: a model's own, or one trained here on text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from trime.common.pretrained import check_version, load_error
from trime.errors import UserError

UNKNOWN, PADDING, END = "<unk>", "<pad>", "</s>"
MESSAGE = "xyzzy"  # the place of a prompt's text in a chat template


def load_tokenizer(name: str) -> Any:
    """Return a model's tokenizer; UserError where it has none, or none with an end-of-text token."""
    check_version()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise load_error(name, "has no tokenizer in the transformers format", error) from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.name={name}: its tokenizer has no end-of-text token, at which an answer would stop")
    return tokenizer


def train_word_level(texts: Iterable[str], limit: int, folder: Path) -> Any:
    """Train a tokenizer of the ``limit`` most frequent words and punctuation marks, and save it in ``folder``."""
    check_version()
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=limit, special_tokens=[PADDING, END, UNKNOWN]))
    return save_tokenizer(words, folder, unk_token=UNKNOWN)


def save_tokenizer(trained: Any, folder: Path, **special: str) -> Any:
    """Save a tokenizers.Tokenizer, trained with PADDING and END, in the transformers format; return it as such."""
    check_version()
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, pad_token=PADDING, eos_token=END, **special)
    tokenizer.save_pretrained(folder)
    return tokenizer


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text without special ones, neither those that the tokenizer adds nor any that the text spells."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.pop(str(tokenizer.unk_token), None)  # it is also read for what the vocabulary lacks
    if not special or set(special.values()).isdisjoint(ids):
        return ids
    # Where the vocabulary has such a symbol as a word (Unigram, WordLevel), cutting it makes it text.
    cuts = [match.start() + 1 for match in re.finditer("|".join(map(re.escape, special)), text)]
    pieces = [text[first:last] for first, last in pairwise([0, *cuts, len(text)])]
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    return [token for piece in pieces for token in tokenizer(piece, **plain).input_ids]


def encode_template(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a part of a chat template, whose special symbols are meant as such."""
    return tokenizer(text, add_special_tokens=False).input_ids


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt with the tokenizer's special tokens: a start token (Llama), or an end token (T5)."""
    before, after = prompt_frame(tokenizer, chat_template=False)
    return [*before, *encode_text(tokenizer, text), *after]


def prompt_frame(tokenizer: Any, chat_template: bool | None) -> tuple[list[int], list[int]]:
    """Return the tokens before and after the text of a prompt: of the model's chat template, or its special tokens.

    ``chat_template=None``: the template where the tokenizer has one. Raises UserError if it is asked for and there is none.
    """
    if chat_template and not tokenizer.chat_template:
        raise UserError("answering.chat_template=true: the model's tokenizer has none, set it to null or false")
    if tokenizer.chat_template and chat_template is not False:
        messages = [{"role": "user", "content": MESSAGE}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        frame = whole.split(MESSAGE)
        if len(frame) != 2:
            raise UserError("the model's chat template does not show a message as it is: set answering.chat_template=false")
        return encode_template(tokenizer, frame[0]), encode_template(tokenizer, frame[1])
    whole, text = tokenizer(MESSAGE).input_ids, encode_text(tokenizer, MESSAGE)
    start = next((place for place in range(len(whole)) if text and whole[place : place + len(text)] == text), None)
    if start is None:
        raise UserError("the model's tokenizer does not encode a text as a part of a prompt: take another model")
    return whole[:start], whole[start + len(text) :]


class PieceTokenizer:
    """A model's tokenizer for running text, without special tokens; ``start`` precedes a document's first piece.

    Lines are tokenized in blocks of at least ``size`` bytes, so that pieces may span line ends. Text that spells a special
    token is text, unless ``reads_special``, for what a chat template has written.
    """

    characters = False

    def __init__(self, name: str, size: int = 2**20):
        self.tokenizer, self.size, self.reads_special = load_tokenizer(name), size, False
        pieces = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        self.symbols = [f"<none {number}>" if piece is None else piece for number, piece in enumerate(pieces)]
        self.start: str = self.tokenizer.bos_token or self.tokenizer.eos_token
        self.unknown: str = self.tokenizer.unk_token or self.start

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        """Yield the pieces of a document, block by block."""
        block, size = [], 0
        for line in lines:
            block.append(line)
            size += len(line)
            if size >= self.size:
                yield self.pieces_of(block)
                block, size = [], 0
        if block:
            yield self.pieces_of(block)

    def text(self, symbols: list[str]) -> str:
        """Return pieces as text."""
        return self.tokenizer.convert_tokens_to_string(symbols)

    def pieces_of(self, lines: list[bytes]) -> list[str]:
        encode = encode_template if self.reads_special else encode_text
        ids = encode(self.tokenizer, b"".join(lines).decode("utf-8", "replace"))
        return [self.symbols[number] for number in ids]
