"""Reads long inputs chunk by chunk through a stack whose layers have memories (Attendre section 3.2, Figure 2).

Each layer delays its output by the size of its query memory. At the end of the input, the queries that still wait are
flushed, one layer after another in a single step each, or drained by chunks of padding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from trime.memory.bounded import BoundedMemory
from trime.models.attendre import Attendre, AttendreState, AttentionOutput, Queries, scored_as
from trime.models.layers.attention import AttentionTrace
from trime.models.layers.topk_attention import masked_softmax
from trime.models.pretrained.family import Family
from trime.models.pretrained.head_rows import heads_to_rows, rows_to_heads, side_by_side
from trime.types import Float, Int, Tensor


class Hidden(NamedTuple):
    """Inputs or outputs of layers, in order; position -1 is padding. ``document`` is metadata of the entries in memory."""

    x: Float[Tensor, "b l e"]
    position: Int[Tensor, "b l"]
    document: Int[Tensor, "b l"]

    @classmethod
    def of(cls, x: Float[Tensor, "b l e"], position: Int[Tensor, "b l"]) -> Hidden:
        """Return hidden states of document 0."""
        return cls(x, position, torch.zeros_like(position))


class Stack:
    """A family's layers with a memory for each of them; their states go in and come out.

    ``overwrite``: entries are written into the tensors of the state that goes in, which is of no use afterwards. ``per_head``:
    each head of keys keeps entries of its own, so that states have a row for each head of each row.
    """

    def __init__(
        self,
        family: Family,
        memories: list[Attendre],
        record_attention: bool = False,
        overwrite: bool = False,
        per_head: bool = False,
    ):
        if len(memories) != len(family.layers):
            raise ValueError(f"{len(memories)} memories for {len(family.layers)} layers")
        self.family, self.memories, self.overwrite = family, memories, overwrite
        self.heads = family.key_heads if per_head else 1
        self.last_outputs: list[AttentionOutput] | None = [] if record_attention else None  # of each layer

    def initial_state(self, x: Float[Tensor, "b l e"]) -> list[AttendreState]:
        """Return the layers' states before any input, for inputs like ``x``."""
        no_tokens = Hidden.of(x[:, :0], torch.zeros(len(x), 0, dtype=torch.long, device=x.device))
        parts = (self.project(number, no_tokens) for number in range(len(self.memories)))
        return [memory.initial_state(entries, queries) for memory, (entries, queries) in zip(self.memories, parts, strict=True)]

    def project(self, number: int, hidden: Hidden) -> tuple[tuple[Tensor, ...], Queries]:
        """Return a layer's entries, and its queries with the columns that wait with them.

        On the CPU both are float32 whatever the model's precision is, since attention is faster in it there.
        """
        query, key, value = map(float32_on_cpu, self.family.layers[number].project(hidden.x))
        entries = (self.family.stored(key, hidden.position), value, hidden.document)
        queries = Queries((query, hidden.x, hidden.document), hidden.position)
        return heads_to_rows(entries, queries, self.heads) if self.heads > 1 else (entries, queries)

    def forward(self, state: list[AttendreState], hidden: Hidden, first: int = 0) -> tuple[list[AttendreState], Hidden]:
        """Run a chunk through the layers from ``first`` on; return their states and the output."""
        state = list(state)
        for number in range(first, len(self.memories)):
            entries, queries = self.project(number, hidden)
            state[number], output = self.memories[number].step(
                state[number], entries, queries, self.family.score, self.overwrite
            )
            hidden = self.finish_layer(number, output)
        return state, hidden._replace(x=self.family.final_norm(hidden.x))

    def attention_traces(self) -> list[AttentionTrace]:
        """Return the attention of the last query of each layer, where it is recorded."""
        traces = []
        for output in self.last_outputs or []:
            rows = torch.arange(len(output.position), device=output.position.device)
            weight = masked_softmax(output.retrieved.similarity)[rows, :, output.position.argmax(1)]
            share = side_by_side(weight.mean(1), self.heads) / self.heads
            traces.append(AttentionTrace(share, side_by_side(output.retrieved.position, self.heads)))
        return traces

    def finish_layer(self, number: int, output: AttentionOutput) -> Hidden:
        """Return a layer's output, given that of its attention."""
        if self.last_outputs is not None and bool((output.position >= 0).any()):
            self.last_outputs[number : number + 1] = [output]
        output = rows_to_heads(output, self.heads) if self.heads > 1 else output
        x, document = output.payload
        return Hidden(self.family.layers[number].finish(x, output.attended.to(x.dtype)), output.position, document)


def float32_on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor of half precision on the CPU in float32, and any other as it is."""
    return tensor.float() if tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class LongReader:
    """Reads an input through a stack and keeps the states of its layers."""

    def __init__(
        self,
        family: Family,
        memories: list[Attendre],
        chunk: int = 128,
        record_attention: bool = False,
        per_head: bool = False,
    ):
        self.stack, self.chunk = Stack(family, memories, record_attention, overwrite=True, per_head=per_head), chunk
        self.state: list[AttendreState] = []
        self.read = 0  # positions so far, padding included

    def fork(self, rows: list[int]) -> LongReader:
        """Return a reader whose rows have read what these have, in any number; what either reads from now on is its own."""
        other = copy.copy(self)
        other.stack = copy.copy(self.stack)
        other.stack.last_outputs = None if self.stack.last_outputs is None else []
        taken = torch.tensor([row * self.stack.heads + head for row in rows for head in range(self.stack.heads)])
        other.state = [layer.take_rows(taken.to(layer.keys.ranking.clock.device)) for layer in self.state]
        return other

    @torch.no_grad()
    def feed(
        self, tokens: Int[Tensor, "b l"], position: Int[Tensor, "b l"], document: Int[Tensor, "b l"] | None = None
    ) -> Iterator[Hidden]:
        """Read more of the input, at its positions (-1 is padding), and yield the stack's output chunk by chunk."""
        document = torch.zeros_like(position) if document is None else document
        for start in range(0, tokens.shape[1], self.chunk):
            part = slice(start, start + self.chunk)
            x = self.stack.family.embed(tokens[:, part])
            self.read += x.shape[1]
            self.state = self.state or self.stack.initial_state(x)
            yield self.forward(Hidden(x, position[:, part], document[:, part]))

    def forward(self, hidden: Hidden, first: int = 0) -> Hidden:
        """Run a chunk through the layers from ``first`` on."""
        self.state, hidden = self.stack.forward(self.state, hidden, first)
        return hidden

    def resize(self, sizes: list[int]) -> None:
        """Give the layers' memories other sizes: of a smaller one, its policy's best entries stay."""
        pairs = zip(self.stack.memories, sizes, strict=True)
        self.replace_memories([replace(memory, keys=BoundedMemory(size, memory.keys.policy)) for memory, size in pairs])

    def replace_memories(self, memories: list[Attendre]) -> None:
        """Continue with other memories, each with copies of the best entries of the one before it."""
        self.stack.memories = memories
        self.state = [
            layer._replace(keys=memory.keys.fit(layer.keys))
            for layer, memory in zip(self.state, self.stack.memories[: len(self.state)], strict=True)
        ]

    def look_back(self, tokens: Int[Tensor, "b l"], position: Int[Tensor, "b l"]) -> None:
        """Let tokens attend to all that the memories hold, and take the scores that entries have after it.

        The tokens themselves are forgotten, and evict nothing: another reader, which has room for them, reads them at once.
        """
        other = copy.copy(self)
        other.stack, other.chunk = copy.copy(self.stack), tokens.shape[1]
        other.stack.last_outputs = None
        other.replace_memories([memory.with_room(tokens.shape[1]) for memory in self.stack.memories])
        for _ in other.feed(tokens, position):
            pass
        self.state = [
            mine._replace(keys=scored_as(mine.keys, theirs.keys)) for mine, theirs in zip(self.state, other.state, strict=True)
        ]

    def kept(self) -> list[Int[Tensor, "b m"]]:
        """Return the positions of the entries that each layer's memory holds; -1 is an empty slot.

        With ``per_head`` those of all heads stand side by side.
        """
        return [side_by_side(layer.keys.ranking.position, self.stack.heads) for layer in self.state]

    def end(self, how: str) -> Iterator[Hidden]:
        """Let all waiting queries attend, by ``flush`` or ``drain``; queries of later (generated) tokens attend at once."""
        yield from {"flush": self.flush, "drain": self.drain}[how]()
        self.stack.memories = [replace(memory, query_size=0) for memory in self.stack.memories]

    @torch.no_grad()
    def flush(self) -> Iterator[Hidden]:
        """Let all waiting queries attend, one layer after another; the next layers read a layer's output as one chunk."""
        for number, memory in enumerate(self.stack.memories):
            waiting = self.state[number].queries.position.shape[1]
            if waiting:
                self.state[number], output = memory.release(self.state[number], waiting, self.stack.family.score)
                yield self.forward(self.stack.finish_layer(number, output), number + 1)

    @torch.no_grad()
    def drain(self) -> Iterator[Hidden]:
        """Push out waiting queries with chunks of padding: as many positions as all query memories hold."""
        memories = [replace(memory, query_size=min(memory.query_size, self.read)) for memory in self.stack.memories]
        self.stack.memories = memories
        x = self.state[0].queries.columns[1]
        padding = x.new_zeros(len(x) // self.stack.heads, self.chunk, x.shape[2] * self.stack.heads)
        position = torch.full(padding.shape[:2], -1, device=x.device)
        for _ in range(-(-sum(memory.query_size for memory in memories) // self.chunk)):
            yield self.forward(Hidden.of(padding, position))
