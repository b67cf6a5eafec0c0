"""A causal language model of transformers as a text memory reads it: contexts are what its output layer reads.

A hook on the output layer catches them, so that any class of models serves that has one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from trime.common.checks import check_number
from trime.common.pretrained import device_of, identity_of_model, positions_of, unwrapped
from trime.common.types import Float, Int, Tensor
from trime.data.datasets.files import one_line_end, whole_characters
from trime.errors import UserError
from trime.models.pretrained.tokenizer import encode_text, prompt_frame

PROBE = Path(__file__).with_name("probe.txt")  # a text that tells tokenizers apart and gives the scale of contexts
SCORES = 2**24  # log-probabilities that are held at once
PROBED = 8  # tokens whose contexts may not depend on as many that follow
ANCHOR = "a"  # decoded before a token, so that the space that the token begins with is not dropped


class WindowOutput(NamedTuple):
    """The contexts before some tokens, and the log-probability of every token after each; None where nobody asked."""

    context: Float[Tensor, "n d"]
    log_probability: Float[Tensor, "n v"] | None


class Calls(threading.local):
    """The calls of the model that a thread has made, and the inputs of the output layer in them; each thread has its own."""

    last: Float[Tensor, "b n d"] | None = None  # contexts that it read last
    since: int = 0  # calls since these were asked for
    wanted: int | None = None  # last contexts whose logits are computed; None: all
    keeps_scores: bool = False  # the model's logits of the last token are wanted too, before any processor changes them
    scores: Float[Tensor, "b v"] | None = None


class Hook:
    """A hook on a module, which calls a decoder's method as long as that lives; that of a copied module does nothing.

    The model must not keep the decoder alive, and can be pickled and sent to other processes.
    """

    def __init__(self, method: Callable[..., Any] | None = None):
        self.method = (lambda: None) if method is None else weakref.WeakMethod(method)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *arguments: Any) -> Any:
        method = self.method()
        return method(*arguments) if method else None

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Decoder:
    """``model`` and ``tokenizer``; a text is read in windows of ``window`` tokens after up to ``overlap`` earlier ones."""

    def __init__(self, model: Any, tokenizer: Any, window: int, overlap: int):
        check_number("window", window, at_least=1, whole=True)
        check_number("overlap", overlap, at_least=0, whole=True)
        self.model, self.tokenizer, self.window, self.overlap = model, tokenizer, window, overlap
        own = unwrapped(model)
        head = getattr(own, "get_output_embeddings", lambda: None)()
        if head is None or own.config.is_encoder_decoder:
            raise UserError(f"{type(own).__name__} has no output layer that continues a text: pass a causal language model")
        self.check_mode()
        self.width, symbols = shape_of_linear(head)
        self.vocabulary = max(symbols, len(tokenizer))
        self.embedded = own.get_input_embeddings().num_embeddings
        self.anchor = tokenizer(ANCHOR, add_special_tokens=False).input_ids[-1:]
        self.start = prompt_frame(tokenizer, chat_template=False)[0]  # as the tokenizer begins every text
        positions = positions_of(own.config)
        if window + overlap + len(self.start) > positions:
            self.overlap = min(overlap, positions // 4)
            self.window = min(window, positions - self.overlap - len(self.start))
        self.calls = Calls()
        self.pieces = Pieces(tokenizer, self.anchor)
        for hook in (head.register_forward_pre_hook(Hook(self.catch)), own.register_forward_hook(Hook(self.keep_scores))):
            weakref.finalize(self, hook.remove)
        self.check_causal()

    def catch(self, module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Keep the contexts that the output layer reads, and let it compute for those alone whose logits are wanted."""
        calls = self.calls
        calls.last, calls.since = inputs[0].detach(), calls.since + 1
        return (inputs[0][:, -calls.wanted :],) if calls.wanted else None

    def keep_scores(self, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the logits of the last token, where they are wanted."""
        if self.calls.keeps_scores:
            self.calls.scores = output.logits[:, -1].detach()

    def take_last(self) -> tuple[Tensor | None, int]:
        """Return the contexts that the output layer read last in this thread, and in how many calls since the last time."""
        calls = self.calls
        last, since = calls.last, calls.since
        calls.last, calls.since = None, 0
        return last, since

    def finite(self, context: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return contexts; UserError where they overflowed."""
        if not context.isfinite().all():
            raise UserError(f"the model's contexts hold NaN or infinity in {self.model.dtype}: load it in bfloat16 or float32")
        return context

    def check_mode(self) -> None:
        """Raise UserError if the model drops units out."""
        if self.model.training:
            raise UserError("the model is in training mode, in which its contexts are drawn at random: call model.eval() first")

    def check_causal(self) -> None:
        """Raise UserError if contexts depend on tokens that follow them, as in a model that fills gaps."""
        tokens = torch.arange(2 * PROBED).remainder(self.embedded).repeat(2, 1)
        tokens[1, PROBED:] = tokens[1, PROBED:].flip(0)
        with torch.no_grad(), self.with_logits_of(1):
            self.model(input_ids=tokens.to(device_of(self.model)), use_cache=False)
        last, _ = self.take_last()
        if last is None:
            raise UserError(f"{type(self.model).__name__} does not call its output layer: pass a causal language model")
        one, other = last[:, -2 * PROBED : -PROBED].float()  # prompts that were learned come before them
        rounding = 1e-4 if last.dtype == torch.float32 else 3e-2
        if (one - other).norm() > rounding * one.norm():
            raise UserError(
                f"{type(self.model).__name__} sees what follows a token, which it should predict: pass a causal language model "
                "(of BERT and the like one with is_decoder=True)"
            )

    @contextmanager
    def with_scores(self) -> Iterator[None]:
        """Keep the model's own logits of each token, for a processor."""
        self.calls.keeps_scores = True
        try:
            yield
        finally:
            self.calls.keeps_scores, self.calls.scores = False, None

    @contextmanager
    def with_logits_of(self, count: int) -> Iterator[None]:
        """Let the model compute the logits of the last ``count`` contexts alone."""
        self.calls.wanted = count
        try:
            yield
        finally:
            self.calls.wanted = None

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, after those that begin every text of this model."""
        tokens = np.array([*self.start, *encode_text(self.tokenizer, as_stored(text))], np.int64)
        if len(tokens) and tokens.max() >= self.embedded:
            raise UserError(
                f"the tokenizer has a token {tokens.max():,}, the model tokens 0 to {self.embedded - 1:,}: pass the model's own"
            )
        return tokens

    def read(self, tokens: Int[Tensor, " _"], logits: bool) -> Iterator[WindowOutput]:
        """Yield the contexts before each token but the first, window by window, with log-probabilities if ``logits``."""
        for first in range(0, len(tokens) - 1, self.window):
            begin, end = max(0, first - self.overlap), min(first + self.window, len(tokens) - 1)
            start = torch.tensor(self.start if begin else [], dtype=torch.long)
            yield from self.read_window(torch.cat([start, tokens[begin:end]]), end - first, logits)

    def read_window(self, tokens: Int[Tensor, " _"], scored: int, logits: bool) -> Iterator[WindowOutput]:
        """Read some tokens; yield the contexts of the last ``scored`` ones, with log-probabilities if ``logits``.

        Log-probabilities come for some contexts at a time: those of a window and 262,144 symbols are a gigabyte, several times.
        """
        self.check_mode()
        with torch.no_grad(), self.with_logits_of(scored if logits else 1):
            scores = self.model(input_ids=tokens[None].to(device_of(self.model)), use_cache=False).logits
        last, _ = self.take_last()
        assert last is not None
        context = self.finite(last[0, -scored:].float())
        if not logits:
            yield WindowOutput(context, None)
            return
        rows = max(1, SCORES // scores.shape[-1])
        for some, own in zip(context.split(rows), scores[0, -scored:].split(rows), strict=True):
            yield WindowOutput(some, own.float().log_softmax(-1))

    def identity(self) -> dict[str, str]:
        """Return the identity of this model and tokenizer; it does not depend on the type of the weights."""
        words = xxhash.xxh3_64()
        for word, number in sorted(self.tokenizer.get_vocab().items()):
            words.update(f"{number} {word}\n".encode())
        # Others may have the same vocabulary, and cut text otherwise or begin it with another token.
        words.update(str([self.start, encode_text(self.tokenizer, PROBE.read_text(encoding="utf-8"))]).encode())
        return {"model": identity_of_model(self.model), "tokenizer": words.hexdigest()}

    def text_of(self, tokens: Any) -> str:
        """Return the text of some tokens, with the space that the first begins with."""
        return str(self.tokenizer.decode([*self.anchor, *tokens], clean_up_tokenization_spaces=False)).removeprefix(ANCHOR)

    def inside(self, text: str) -> list[int]:
        """Return the tokens of a text that continues another: without the space that some tokenizers put before every text."""
        plain: list[int] = encode_text(self.tokenizer, text)
        if self.text_of(plain) == text:
            return plain
        after_end = encode_text(self.tokenizer, f"\n{text}")
        ways = [encode_text(self.tokenizer, text[1:]), *(after_end[first:] for first in range(1, len(after_end)))]
        return next((tokens for tokens in ways if self.text_of(tokens) == text), plain)

    def lines(self, tokens: np.ndarray) -> np.ndarray:
        """Return the line on which each token begins, counted from 1; line ends that a token begins with come before it."""
        distinct, inverse = np.unique(tokens, return_inverse=True)
        pieces = [self.tokenizer.decode([int(token)]) for token in distinct]
        ends = np.array([piece.count("\n") for piece in pieces])[inverse]
        leading = np.array([len(piece) - len(piece.lstrip("\n")) if piece.strip("\n") else 0 for piece in pieces])[inverse]
        return 1 + np.cumsum(ends) - ends + leading

    def without_padding(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens of a row without padding on the left."""
        padding = self.tokenizer.pad_token_id
        begin = 0 if padding is None else int((tokens != padding).argmax())
        start = self.start if begin and padding in self.start else []
        return np.concatenate([np.array(start, np.int64), tokens[begin:]])

    def without_end(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens of a row without padding behind its end."""
        if self.tokenizer.pad_token_id in (None, self.tokenizer.eos_token_id):
            return tokens
        is_text = np.flatnonzero(tokens != self.tokenizer.pad_token_id)
        return tokens[: int(is_text[-1]) + 1] if len(is_text) else tokens


def shape_of_linear(layer: Any) -> tuple[int, int]:
    """Return the widths of a linear layer's input and output; in a quantised one ``weight`` may be anything."""
    if hasattr(layer, "in_features"):
        return layer.in_features, layer.out_features
    symbols, width = layer.weight.shape
    return width, symbols


def as_stored(text: str) -> str:
    """Return a text as one is that was read from a file."""
    return one_line_end(whole_characters(text))


class Pieces:
    """The text of every token of a tokenizer, in which tokens are looked up that continue a text."""

    def __init__(self, tokenizer: Any, anchor: list[int]):
        self.tokenizer, self.anchor = tokenizer, anchor  # of which tokens are decoded behind

    @cached_property
    def texts(self) -> list[str]:
        """The text of each token, with the space that it begins with; empty for special tokens and parts of characters."""
        special = {*self.tokenizer.all_special_ids}
        texts = self.tokenizer.batch_decode([[*self.anchor, token] for token in range(len(self.tokenizer))])
        return [
            "" if token in special or "\N{REPLACEMENT CHARACTER}" in text else text.removeprefix(ANCHOR)
            for token, text in enumerate(texts)
        ]

    def that_begin_with(self, text: str) -> list[int]:
        """Return the tokens whose text begins with a text; after blanks, those that go on with something else."""
        found = [token for token, piece in enumerate(self.texts) if piece.startswith(text)]
        return [token for token in found if self.texts[token][len(text) :].strip()] if text.isspace() else found
