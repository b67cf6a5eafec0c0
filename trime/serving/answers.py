"""Answers in the form of OpenAI's API, whole or in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from itertools import accumulate, product
from typing import Any, NamedTuple

from trime.errors import UserError
from trime.serving.requests import LONG, AskedChat, AskedCompletion
from trime.serving.served import Explained, Reading, Served, ServedToken


class Piece(NamedTuple):
    """What is new in one of the answers of a request; ``finish``: why it ends here (stop, length)."""

    number: int  # of the answer
    text: str
    tokens: list[ServedToken]
    finish: str | None = None
    sources: list[Explained] = []


class Usage(NamedTuple):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int

    def to_json(self) -> dict[str, int]:
        return self._asdict() | {"total_tokens": sum(self)}


class Answer:
    """A text that is written: how much of it can be sent, and whether a stop was reached."""

    def __init__(self, number: int, stops: list[str], emit: Callable[[Piece], bool]):
        self.number, self.stops, self.emit = number, stops, emit
        self.text, self.sent = "", 0
        self.tokens: list[ServedToken] = []
        self.written = 0  # tokens
        self.stopped = False

    def take(self, token: ServedToken, text: str) -> bool:
        """Take a token and the text so far; return whether to go on."""
        self.tokens.append(token)
        self.written += 1
        return self.grow(text, last=False) and not self.stopped

    def grow(self, text: str, last: bool, sources: list[Explained] | None = None, ended: bool = False) -> bool:
        """Send what is new in a text but for what may be the beginning of a stop; return whether anyone listens."""
        if not self.stopped:
            found = [text.index(stop) for stop in self.stops if stop in text]
            self.stopped, self.text = bool(found), text[: min(found, default=len(text))]
        held = 0 if last or self.stopped else max((beginning(self.text, stop) for stop in self.stops), default=0)
        until = len(self.text) - held
        if until <= self.sent and not last:
            return self.emit(Piece(self.number, "", []))
        new, self.sent = self.text[self.sent : until], until
        tokens, self.tokens = self.tokens, []
        if self.stopped:  # the tokens of the stop are not in the answer
            while tokens and not self.text.endswith(tokens[-1].text):
                tokens.pop()
        finish = ("stop" if ended or self.stopped else "length") if last else None
        return self.emit(Piece(self.number, new, tokens, finish, sources or []))


def beginning(text: str, stop: str) -> int:
    """Return the length of the longest beginning of a stop with which a text ends."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)


def answer(served: Served, asked: AskedCompletion | AskedChat, emit: Callable[[Piece], bool]) -> Usage:
    """Answer a request piece by piece; ``emit`` returns whether anyone listens. UserError for what cannot be answered."""
    prompts, read, written = asked.prompts(served), 0, 0
    served.check_silent(frozenset(asked.silent))
    tokens = [served.tokens(prompt) for prompt in prompts]
    lengths = [length_of(served, asked, len(each)) for each in tokens]
    for number, (which, again) in enumerate(product(range(len(prompts)), range(asked.n))):
        wanted = asked.wanted(again, lengths[which], asked.likeliest or 0)
        one, sources = Answer(number, asked.stops, emit), list[Explained]()
        if asked.echo:
            given = prompts[which]
            text = given if isinstance(given, str) else served.text(tokens[which])
            is_read = asked.likeliest is not None or asked.sources
            reading = served.read(given, wanted, asked.explained) if is_read else Reading([], [])
            sources = reading.sources
            emit(Piece(number, text, reading.tokens))
        text, ended = "", False
        if lengths[which]:
            text, ended, own = served.write(prompts[which], wanted, one.take)
            before = accumulate((len(token.text) for token in own), initial=0)
            sources = sources + [token for token, at in zip(own, before, strict=False) if at < len(one.text)]
        listening = one.grow(text, last=True, sources=sources, ended=ended)
        read, written = read + len(tokens[which]), written + one.written
        if not listening:
            break
    return Usage(read, written)


def length_of(served: Served, asked: AskedCompletion | AskedChat, tokens: int) -> int:
    """Return how many tokens may be written after a prompt; UserError where both are longer than the model reads."""
    most = asked.max_tokens
    if isinstance(asked, AskedChat) and most is None:
        most = asked.max_completion_tokens
    if not tokens:
        raise UserError("the prompt is empty: pass some text")
    if served.longest is None:
        return LONG if most is None else most
    if tokens + (most or 1) > served.longest:
        raise UserError(f"the prompt has {tokens:,} tokens, prompt and answer together may have {served.longest:,}")
    return min(LONG, served.longest - tokens) if most is None else most


class Form:
    """The JSON of the answers to one request."""

    def __init__(self, served: Served, asked: AskedCompletion | AskedChat):
        self.asked, self.is_chat = asked, isinstance(asked, AskedChat)
        self.head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }
        self.offsets: dict[int, int] = {}  # characters of each answer that were sent
        self.begun: set[int] = set()

    def whole(self, pieces: Iterable[Piece], usage: Usage) -> dict[str, Any]:
        """Return the answers as one object."""
        together: dict[int, Piece] = {}
        for piece in pieces:
            old = together.get(piece.number, Piece(piece.number, "", []))
            text, tokens = old.text + piece.text, old.tokens + piece.tokens
            together[piece.number] = Piece(piece.number, text, tokens, piece.finish, old.sources + piece.sources)
        choices = [self.choice(piece, streamed=False) for piece in together.values()]
        return self.head | {"choices": choices, "usage": usage.to_json()}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return a piece of an answer as a streamed object."""
        kind = {"object": "chat.completion.chunk"} if self.is_chat else {}
        return self.head | kind | {"choices": [self.choice(piece, streamed=True)]}

    def choice(self, piece: Piece, streamed: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"index": piece.number, "finish_reason": piece.finish, "logprobs": None}
        if self.asked.likeliest is not None:
            content["logprobs"] = self.chat_logprobs(piece) if self.is_chat else self.logprobs(piece)
        if not self.is_chat:
            content["text"] = piece.text
        elif streamed:
            role = {} if piece.number in self.begun else {"role": "assistant"}
            content["delta"] = role | ({"content": piece.text} if piece.text or role else {})
            self.begun.add(piece.number)
        else:
            content["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
        if self.asked.sources and (piece.finish or not streamed):
            content["sources"] = [token.to_json() for token in piece.sources]
        return content

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        offsets, at = [], self.offsets.get(piece.number, 0)
        for token in piece.tokens:
            offsets.append(at)
            at += len(token.text)
        self.offsets[piece.number] = at
        return {
            "tokens": [token.text for token in piece.tokens],
            "token_logprobs": [token.log_probability for token in piece.tokens],
            "top_logprobs": [token.likeliest if token.log_probability is not None else None for token in piece.tokens],
            "text_offset": offsets,
        }

    def chat_logprobs(self, piece: Piece) -> dict[str, Any]:
        def entry(text: str, value: float | None) -> dict[str, Any]:
            return {"token": text, "logprob": value, "bytes": [*text.encode()]}

        content = [
            entry(token.text, token.log_probability)
            | {"top_logprobs": [entry(text, value) for text, value in token.likeliest.items()]}
            for token in piece.tokens
        ]
        return {"content": content, "refusal": None}
