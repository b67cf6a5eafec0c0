"""Reads long inputs chunk by chunk through a stack whose layers have memories (Attendre section 3.2, Figure 2).

Each layer delays what it hands on by the size of its query memory. At the end of the input what still waits is
flushed, layer by layer, in one step of full size each, or drained by chunks of padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from trime.models.attendre import Attendre, Queries, Waiting
from trime.models.pretrained.family import Family
from trime.types import Float, Int, Tensor


class Hidden(NamedTuple):
    """Outputs of the stack as they come, in order; position -1 is padding."""

    x: Float[Tensor, "b l e"]
    position: Int[Tensor, "b l"]


class LongReader:
    """A stack, a memory for each of its layers, and what they hold."""

    def __init__(self, family: Family, memories: list[Attendre], chunk: int = 128):
        if len(memories) != len(family.layers):
            raise ValueError(f"{len(memories)} memories for {len(family.layers)} layers")
        self.family, self.memories, self.chunk = family, memories, chunk
        self.state: list[Waiting] = []
        self.read = 0  # positions so far, those of padding included

    @torch.no_grad()
    def feed(self, tokens: Int[Tensor, "b l"], position: Int[Tensor, "b l"]) -> Iterator[Hidden]:
        """Reads more of the input, at its positions; -1 is padding. Yields what has come through, chunk by chunk."""
        for start in range(0, tokens.shape[1], self.chunk):
            part = slice(start, start + self.chunk)
            self.read += tokens[:, part].shape[1]
            yield self.through(0, Hidden(self.family.embed(tokens[:, part]), position[:, part]))

    def end(self, how: str) -> Iterator[Hidden]:
        """All that still waits attends; from here on queries attend at once, as those of generated tokens do."""
        yield from {"flush": self.flush, "drain": self.drain}[how]()
        self.memories = [replace(memory, waiting=0) for memory in self.memories]

    def through(self, first: int, hidden: Hidden) -> Hidden:
        """What layers from ``first`` on make of a chunk."""
        for number in range(first, len(self.memories)):
            query, key, value = self.family.layers[number].project(hidden.x)
            queries = Queries((query, hidden.x), hidden.position)
            own = (self.family.stored(key, hidden.position), value)
            if len(self.state) == number:
                self.state.append(self.memories[number].start(own, queries))
            memory, score = self.memories[number], self.family.score
            self.state[number], left = memory.step(self.state[number], own, queries, score)
            hidden = Hidden(self.family.layers[number].finish(left.along[0], left.attended), left.position)
        return Hidden(self.family.last(hidden.x), hidden.position)

    @torch.no_grad()
    def flush(self) -> Iterator[Hidden]:
        """All that waits attends, a layer after the other; what a layer lets go, the next ones read as one chunk."""
        for number, memory in enumerate(self.memories):
            waiting = self.state[number].queries.position.shape[1]
            if not waiting:
                continue
            self.state[number], left = memory.release(self.state[number], waiting, self.family.score)
            x = self.family.layers[number].finish(left.along[0], left.attended)
            yield self.through(number + 1, Hidden(x, left.position))

    @torch.no_grad()
    def drain(self) -> Iterator[Hidden]:
        """Chunks of padding push out what waits: as many positions as all query memories hold, none larger than a chunk."""
        self.memories = [replace(memory, waiting=min(memory.waiting, self.read)) for memory in self.memories]
        x = self.state[0].queries.columns[1]
        padding = x.new_zeros(len(x), self.chunk, x.shape[2])
        nothing = torch.full(padding.shape[:2], -1, device=x.device)
        for _ in range(-(-sum(memory.waiting for memory in self.memories) // self.chunk)):
            yield self.through(0, Hidden(padding, nothing))
