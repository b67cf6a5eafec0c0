"""Answers to long prompts: read with memories, then the likeliest token after the other (Attendre sections 3.3 and 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from trime.eviction.fifo import FIFO
from trime.memory.bounded import BoundedMemory, Held
from trime.models.attendre import Attendre
from trime.models.pretrained.reader import Hidden, LongReader
from trime.models.pretrained.rope import RopeDecoder
from trime.models.pretrained.t5 import T5Encoder
from trime.types import Float, Int, Tensor

Step = Callable[[Tensor], Tensor]  # tokens so far [b t] to logits of the next [b v]


@runtime_checkable
class Answerer(Protocol):
    """Tokens of answers, ``stop`` and what comes after it left out."""

    def answers(self, prompts: list[list[int]], stop: int, longest: int) -> list[list[int]]: ...


class Reading:
    """How prompts are read: a memory for each layer, chunk by chunk; at the end flush or drain."""

    def __init__(self, memories: list[Attendre], chunk: int = 128, end: str = "flush"):
        self.memories, self.chunk, self.ending = memories, chunk, end

    def reader(self, family: Any) -> LongReader:
        return LongReader(family, self.memories, self.chunk)


class DecoderAnswers:
    """A decoder reads the prompt and goes on; generated tokens do not wait."""

    def __init__(self, family: RopeDecoder, reading: Reading):
        self.family, self.reading = family, reading

    def answers(self, prompts: list[list[int]], stop: int, longest: int) -> list[list[int]]:
        """Greedy; prompts of any lengths side by side."""
        reader = self.reading.reader(self.family)
        tokens, position = padded(prompts, self.family.model.device)
        last = Last(position.amax(1))
        for hidden in reader.feed(tokens, position):
            last.see(hidden)
        for hidden in reader.end(self.reading.ending):
            last.see(hidden)
        logits, place = self.family.logits(last.x[:, None])[:, 0], position.amax(1, keepdim=True)

        def step(so_far: Tensor) -> Tensor:
            if not so_far.shape[1]:
                return logits
            (hidden,) = reader.feed(so_far[:, -1:], place + so_far.shape[1])
            return self.family.logits(hidden.x)[:, 0]

        return greedy(step, len(prompts), stop, longest, tokens.device)


class EncoderDecoderAnswers:
    """An encoder reads the prompt into an encoder-output memory of the last ``outputs`` positions; a decoder answers."""

    def __init__(self, family: T5Encoder, reading: Reading, outputs: int = 8192):
        self.family, self.reading, self.memory = family, reading, BoundedMemory(outputs, FIFO())

    def answers(self, prompts: list[list[int]], stop: int, longest: int) -> list[list[int]]:
        """Greedy; prompts of any lengths side by side."""
        held = self.read(prompts)
        order = held.ranking.position.argsort(1)
        encoded = held.columns[0].gather(1, order[..., None].expand_as(held.columns[0]))
        filled = held.ranking.position.gather(1, order) >= 0
        start = self.family.model.config.decoder_start_token_id

        def step(so_far: Tensor) -> Tensor:
            given = torch.cat([torch.full_like(order[:, :1], start), so_far], 1)
            return self.family.logits(given, encoded, filled)[:, -1]

        return greedy(step, len(prompts), stop, longest, order.device)

    def read(self, prompts: list[list[int]]) -> Held:
        """The encoder's outputs, as they come."""
        reader, held = self.reading.reader(self.family), None
        tokens, position = padded(prompts, self.family.model.device)
        for part in (lambda: reader.feed(tokens, position), lambda: reader.end(self.reading.ending)):
            for hidden in part():
                held = self.memory.empty((hidden.x,)) if held is None else held
                held, _ = self.memory.insert(held, (hidden.x,), hidden.position)
        assert held is not None
        return held


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


@torch.no_grad()
def greedy(step: Step, rows: int, stop: int, longest: int, device: Any) -> list[list[int]]:
    """The likeliest token, then the next, until every row has stopped."""
    found = torch.empty(rows, 0, dtype=torch.long, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    while found.shape[1] < longest and not done.all():
        token = step(found).argmax(-1)
        done |= token == stop
        found = torch.cat([found, token[:, None]], 1)
    return [row[: row.index(stop)] if stop in row else row for row in found.tolist()]
