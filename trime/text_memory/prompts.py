"""Prompts of ``TextMemory.generate``: texts, chats or token numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from trime.common.checks import check_in_vocabulary, short_repr
from trime.common.types import Int, Tensor
from trime.errors import UserError
from trime.text_memory.decoder import Decoder

# What a prompt ends with and a token may begin with: a word, marks, or blanks.
LAST_PIECE = re.compile(r" ?\w+$| ?[^\w\s]+$|[ \t]+$")
QUESTION = [{"role": "user", "content": "?"}]  # from which the tokens of a chat template are known


class Prompt(NamedTuple):
    """The tokens [n] that a model is given, and the text behind them, which is written again with what follows it."""

    tokens: np.ndarray
    end: str = ""


def prompts_of(given: Any, decoder: Decoder, heal: bool = True) -> tuple[list[Prompt], bool]:
    """Return the prompts, and whether one alone was given; UserError where it is none of the following.

    Without ``heal`` a text is given as a whole, and nothing of it is written again.

    A text, a chat (messages with role and content), or token numbers [l]; or a list of several of a kind, or numbers [b l].
    """
    if isinstance(given, torch.Tensor | np.ndarray):
        given = given.tolist()
    if read := reader_of(given, heal):
        return [read(given, decoder)], True
    readers = [reader_of(each, heal) for each in given] if isinstance(given, list | tuple) else []
    if not readers or None in readers:
        raise UserError(f"prompt={short_repr(given)}: pass a text, messages with role and content, token numbers, or a list")
    return [read(each, decoder) for read, each in zip(readers, given, strict=True) if read], False


def reader_of(given: Any, heal: bool) -> Callable[[Any, Decoder], Prompt] | None:
    """Return the reader of a single prompt of this kind; None where it is none."""
    if isinstance(given, str):
        return partial(of_text, heal=heal)
    parts = given if isinstance(given, list | tuple) and given else [None]
    if all(isinstance(part, dict) for part in parts):
        return of_chat
    return of_tokens if all(isinstance(part, int) for part in parts) else None


def of_text(text: str, decoder: Decoder, heal: bool) -> Prompt:
    """Return a text; if ``heal``, without its last word or the blanks at its end: a stored token may begin there and go on."""
    if control := next((token for token in template_tokens(decoder) if token in text), None):
        raise UserError(
            f"the prompt spells {control}, which would be read as letters: pass the messages themselves, "
            'generate([{"role": "user", "content": …}]), or token numbers'
        )
    last = LAST_PIECE.search(text) if heal else None
    end = last[0] if last and last[0].isascii() else ""  # a character of several tokens cannot be begun again as text
    tokens = decoder.encode(text.removesuffix(end))
    if not len(tokens):
        tokens, end = decoder.encode(text), ""
    if not len(tokens):
        raise UserError("an empty prompt gives the model nothing to begin with: pass some text")
    return Prompt(tokens, end)


def template_tokens(decoder: Decoder) -> list[str]:
    """Return the special tokens that a chat of this tokenizer has; none where it has no template."""
    tokenizer = decoder.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return []
    written = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    return [token for token in tokenizer.all_special_tokens if token in written]


def of_chat(messages: list[dict[str, Any]], decoder: Decoder) -> Prompt:
    """Return a chat as the tokenizer's template writes it; an answer that is its last message is continued."""
    if not getattr(decoder.tokenizer, "chat_template", None):
        raise UserError("the tokenizer has no chat template: pass a text, or token numbers")
    if not all({"role", "content"} <= {*message} for message in messages):
        raise UserError(f"prompt={short_repr(messages)}: pass messages with role and content")
    goes_on = messages[-1]["role"] == "assistant"
    tokens = decoder.tokenizer.apply_chat_template(
        messages, return_dict=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
    )
    return of_tokens(tokens, decoder)


def of_tokens(numbers: list[int], decoder: Decoder) -> Prompt:
    """Return token numbers as they are."""
    tokens = np.array(numbers, np.int64)
    check_in_vocabulary("prompt", torch.from_numpy(tokens), decoder.embedded)
    return Prompt(tokens)


def padded(prompts: list[Prompt], padding: int) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b l"]]:
    """Return the tokens of prompts as rows that end together, and their mask."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    tokens = torch.full((len(prompts), longest), padding)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt.tokens) :] = torch.from_numpy(prompt.tokens)
        mask[row, longest - len(prompt.tokens) :] = 1
    return tokens, mask
