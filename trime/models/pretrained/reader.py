"""Reads long inputs chunk by chunk through a stack whose layers have memories (Attendre section 3.2, Figure 2).

Each layer delays what it hands on by the size of its query memory. At the end of the input what still waits is
flushed, layer by layer, in one step of full size each, or drained by chunks of padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from trime.models.attendre import Attendre, AttentionOutput, Queries, Waiting
from trime.models.attention_trace import AttentionTrace
from trime.models.layers.topk_attention import attention
from trime.models.pretrained.family import Family
from trime.types import Float, Int, Tensor


class Hidden(NamedTuple):
    """Inputs or outputs of layers as they come, in order; position -1 is padding. What is retrieved tells its document."""

    x: Float[Tensor, "b l e"]
    position: Int[Tensor, "b l"]
    document: Int[Tensor, "b l"]

    @classmethod
    def of(cls, x: Float[Tensor, "b l e"], position: Int[Tensor, "b l"], document: Int[Tensor, "b l"] | None = None) -> Hidden:
        """All of document 0, unless said otherwise."""
        return cls(x, position, torch.zeros_like(position) if document is None else document)


class Stack:
    """A family's layers, and a memory for each of them; what they hold goes in and comes out, layer by layer."""

    def __init__(self, family: Family, memories: list[Attendre], tells: bool = False):
        if len(memories) != len(family.layers):
            raise ValueError(f"{len(memories)} memories for {len(family.layers)} layers")
        self.family, self.memories = family, memories
        self.last: list[AttentionOutput] | None = (
            [] if tells else None
        )  # what the queries that left each layer last have retrieved

    def start(self, x: Float[Tensor, "b l e"]) -> list[Waiting]:
        """What layers hold that have read nothing, for inputs like ``x``."""
        nothing = Hidden.of(x[:, :0], torch.zeros(len(x), 0, dtype=torch.long, device=x.device))
        parts = (self.projected(number, nothing) for number in range(len(self.memories)))
        return [memory.start(own, queries) for memory, (own, queries) in zip(self.memories, parts, strict=True)]

    def projected(self, number: int, hidden: Hidden) -> tuple[tuple[Tensor, ...], Queries]:
        """A layer's entries, and its queries with what waits along."""
        query, key, value = self.family.layers[number].project(hidden.x)
        entries = (self.family.stored(key, hidden.position), value, hidden.document)
        return entries, Queries((query, hidden.x, hidden.document), hidden.position)

    def through(self, state: list[Waiting], hidden: Hidden, first: int = 0) -> tuple[list[Waiting], Hidden]:
        """What layers from ``first`` on make of a chunk."""
        state = list(state)
        for number in range(first, len(self.memories)):
            own, queries = self.projected(number, hidden)
            state[number], left = self.memories[number].step(state[number], own, queries, self.family.score)
            hidden = self.finished(number, left)
        return state, hidden._replace(x=self.family.last(hidden.x))

    def looked(self) -> list[AttentionTrace]:
        """Where the last query of each layer looked, if layers were to tell."""
        return [
            AttentionTrace(
                attention(left.retrieved.similarity)[rows, :, left.position.argmax(1)].mean(1), left.retrieved.position
            )
            for left in self.last or []
            for rows in (torch.arange(len(left.position), device=left.position.device),)
        ]

    def finished(self, number: int, left: AttentionOutput) -> Hidden:
        """A layer's output, where its queries have attended."""
        if self.last is not None and bool((left.position >= 0).any()):
            self.last[number : number + 1] = [left]
        x, document = left.along
        return Hidden(self.family.layers[number].finish(x, left.attended), left.position, document)


class LongReader:
    """Reads an input through a stack, and holds what its layers hold."""

    def __init__(self, family: Family, memories: list[Attendre], chunk: int = 128, tells: bool = False):
        self.stack, self.chunk = Stack(family, memories, tells), chunk
        self.state: list[Waiting] = []
        self.read = 0  # positions so far, those of padding included

    @torch.no_grad()
    def feed(
        self, tokens: Int[Tensor, "b l"], position: Int[Tensor, "b l"], document: Int[Tensor, "b l"] | None = None
    ) -> Iterator[Hidden]:
        """Reads more of the input, at its positions; -1 is padding. Yields what has come through, chunk by chunk."""
        document = torch.zeros_like(position) if document is None else document
        for start in range(0, tokens.shape[1], self.chunk):
            part = slice(start, start + self.chunk)
            x = self.stack.family.embed(tokens[:, part])
            self.read += x.shape[1]
            self.state = self.state or self.stack.start(x)
            yield self.through(Hidden(x, position[:, part], document[:, part]))

    def through(self, hidden: Hidden, first: int = 0) -> Hidden:
        """What layers from ``first`` on make of a chunk."""
        self.state, hidden = self.stack.through(self.state, hidden, first)
        return hidden

    def end(self, how: str) -> Iterator[Hidden]:
        """All that still waits attends; from here on queries attend at once, as those of generated tokens do."""
        yield from {"flush": self.flush, "drain": self.drain}[how]()
        self.stack.memories = [replace(memory, waiting=0) for memory in self.stack.memories]

    @torch.no_grad()
    def flush(self) -> Iterator[Hidden]:
        """All that waits attends, a layer after the other; what a layer lets go, the next ones read as one chunk."""
        for number, memory in enumerate(self.stack.memories):
            waiting = self.state[number].queries.position.shape[1]
            if waiting:
                self.state[number], left = memory.release(self.state[number], waiting, self.stack.family.score)
                yield self.through(self.stack.finished(number, left), number + 1)

    @torch.no_grad()
    def drain(self) -> Iterator[Hidden]:
        """Chunks of padding push out what waits: as many positions as all query memories hold, none larger than a chunk."""
        memories = [replace(memory, waiting=min(memory.waiting, self.read)) for memory in self.stack.memories]
        self.stack.memories = memories
        x = self.state[0].queries.columns[1]
        padding = x.new_zeros(len(x), self.chunk, x.shape[2])
        nothing = torch.full(padding.shape[:2], -1, device=x.device)
        for _ in range(-(-sum(memory.waiting for memory in memories) // self.chunk)):
            yield self.through(Hidden.of(padding, nothing))
