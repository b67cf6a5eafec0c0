"""Answers to long prompts: read with memories, then the likeliest token after the other (Attendre sections 3.3 and 4)."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from trime.eviction.fifo import FIFO
from trime.memory.bounded import BoundedMemory, MemoryState
from trime.models.attendre import Attendre
from trime.models.attention_trace import AttentionTrace, mean_of
from trime.models.pretrained.reader import Hidden, LongReader
from trime.models.pretrained.rope import RopeDecoder
from trime.models.pretrained.t5 import T5Encoder
from trime.types import Float, Int, Tensor


@runtime_checkable
class Steps(Protocol):
    """Answers token by token, over prompts that are read."""

    rows: int
    device: Any

    def next(self, so_far: Int[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        """Logits of the next token of each row; ``so_far`` grows by one at a time."""

    def looked(self) -> AttentionTrace:
        """Where the last step's attention went."""


@runtime_checkable
class Answerer(Protocol):
    """A model that reads prompts with memories, then answers."""

    def read(self, prompts: list[list[int]], tells: bool = False) -> Steps:
        """Prompts of any lengths side by side; ``tells``: what attention looked at is kept, step by step."""


class Reading:
    """How prompts are read: a memory for each layer, chunk by chunk; at the end flush or drain."""

    def __init__(self, memories: list[Attendre], chunk: int = 128, end: str = "flush"):
        self.memories, self.chunk, self.ending = memories, chunk, end

    def reader(self, family: Any, tells: bool = False) -> LongReader:
        return LongReader(family, self.memories, self.chunk, tells)


class DecoderAnswers:
    """A decoder reads the prompt and goes on; generated tokens do not wait."""

    def __init__(self, family: RopeDecoder, reading: Reading):
        self.family, self.reading = family, reading

    def read(self, prompts: list[list[int]], tells: bool = False) -> DecoderSteps:
        """Prompts of any lengths side by side."""
        return DecoderSteps(self.family, self.reading, prompts, tells)


class DecoderSteps:
    """A decoder that has read its prompts."""

    def __init__(self, family: RopeDecoder, reading: Reading, prompts: list[list[int]], tells: bool):
        self.family, self.reader, self.rows = family, reading.reader(family, tells), len(prompts)
        tokens, position = padded(prompts, family.model.device)
        self.device, self.place, last = tokens.device, position.amax(1, keepdim=True), Last(position.amax(1))
        for hidden in self.reader.feed(tokens, position):
            last.see(hidden)
        for hidden in self.reader.end(reading.ending):
            last.see(hidden)
        self.x = last.x[:, None]

    @torch.no_grad()
    def next(self, so_far: Int[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        """Logits of the next token of each row."""
        if so_far.shape[1]:
            (hidden,) = self.reader.feed(so_far[:, -1:], self.place + so_far.shape[1])
            self.x = hidden.x
        return self.family.logits(self.x)[:, 0]

    @torch.no_grad()
    def looked(self) -> AttentionTrace:
        """Where each row's last query looked."""
        found = mean_of(self.reader.stack.looked())
        assert found is not None
        return found


class EncoderDecoderAnswers:
    """An encoder reads the prompt into an encoder-output memory of the last ``outputs`` positions; a decoder answers."""

    def __init__(self, family: T5Encoder, reading: Reading, outputs: int = 8192):
        self.family, self.reading, self.memory = family, reading, BoundedMemory(outputs, FIFO())

    def read(self, prompts: list[list[int]], tells: bool = False) -> EncoderDecoderSteps:
        """Prompts of any lengths side by side."""
        return EncoderDecoderSteps(self.family, self.encoded(prompts))

    def encoded(self, prompts: list[list[int]]) -> MemoryState:
        """The encoder's outputs, as they come."""
        reader, held = self.reading.reader(self.family), None
        tokens, position = padded(prompts, self.family.model.device)
        for part in (lambda: reader.feed(tokens, position), lambda: reader.end(self.reading.ending)):
            for hidden in part():
                held = self.memory.empty((hidden.x,)) if held is None else held
                held = self.memory.update(held, (hidden.x,), hidden.position)
        assert held is not None
        return held


class EncoderDecoderSteps:
    """A decoder over what an encoder has read."""

    def __init__(self, family: T5Encoder, held: MemoryState):
        order = held.ranking.position.argsort(1)
        self.family, self.rows, self.device = family, len(order), order.device
        self.encoded = held.columns[0].gather(1, order[..., None].expand_as(held.columns[0]))
        self.position = held.ranking.position.gather(1, order)
        self.start = torch.full_like(order[:, :1], family.model.config.decoder_start_token_id)

    @torch.no_grad()
    def next(self, so_far: Int[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        """Logits of the next token of each row."""
        self.given = torch.cat([self.start, so_far], 1)
        return self.family.logits(self.given, self.encoded, self.position >= 0)[:, -1]

    @torch.no_grad()
    def looked(self) -> AttentionTrace:
        """Where the decoder's last position looked across."""
        return AttentionTrace(self.family.looked(self.given, self.encoded, self.position >= 0), self.position)


class Last:
    """The stack's output at one position of each row, among what comes through."""

    def __init__(self, position: Int[Tensor, " b"]):
        self.position = position
        self.x: Float[Tensor, "b e"]

    def see(self, hidden: Hidden) -> None:
        """Notes it if it is here."""
        if not hasattr(self, "x"):
            self.x = hidden.x.new_zeros(len(hidden.x), hidden.x.shape[-1])
        rows, cells = (hidden.position == self.position[:, None]).nonzero().unbind(1)
        self.x[rows] = hidden.x[rows, cells]


def padded(prompts: list[list[int]], device: Any) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b l"]]:
    """Tokens and positions, padded on the right with token 0 at position -1."""
    width = max(map(len, prompts))
    tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=device)
    place = torch.arange(width, device=device).expand_as(tokens)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return tokens, place.masked_fill(place >= lengths[:, None], -1)


def greedy(steps: Steps, stop: int, longest: int) -> list[list[int]]:
    """The likeliest token, then the next, until every row has stopped; ``stop`` and what comes after it is left out."""
    found = torch.empty(steps.rows, 0, dtype=torch.long, device=steps.device)
    done = torch.zeros(steps.rows, dtype=torch.bool, device=steps.device)
    while found.shape[1] < longest and not done.all():
        token = steps.next(found).argmax(-1)
        done |= token == stop
        found = torch.cat([found, token[:, None]], 1)
    return [row[: row.index(stop)] if stop in row else row for row in found.tolist()]
