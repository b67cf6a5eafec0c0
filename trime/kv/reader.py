"""Reads long inputs chunk by chunk through a stack whose layers have memories (Attendre section 3.2, Figure 2).

Where no query waits, a decoder is read by its own code in transformers. Where queries wait, layers are split at their
attention: each delays its output, and the residual stream with it, by the size of its query memory. At the end of the input,
the queries that still wait are flushed, one layer after another in a single step each, or drained by chunks of padding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from trime.common.types import Float, Int, Tensor
from trime.kv.attendre import Attendre
from trime.kv.layer_memory import LayerMemories, LayerMemory
from trime.kv.recall.store import Recall
from trime.kv.rope import RopeDecoder
from trime.kv.t5 import T5Encoder


class Hidden(NamedTuple):
    """Inputs or outputs of layers, in order; position -1 is padding."""

    x: Float[Tensor, "b l e"]
    position: Int[Tensor, "b l"]


def memories_in_model(
    family: RopeDecoder, memories: list[Attendre], chunk: int, heads: int, records: bool, recall: Recall | None = None
) -> Any:
    """Return an EvictingCache with these memories, for ``RopeDecoder.read``; see ``LayerMemory``."""
    from trime.kv.evicting_cache import EvictingCache  # imports transformers

    layers = [LayerMemory(memory, chunk, family.score_at_0, heads, records, recall) for memory in memories]
    return EvictingCache.of_layers(family.model, layers)


class LongReader:
    """Reads an input in chunks with a memory for each layer, and keeps their states.

    ``per_head``: each head of keys keeps entries of its own. ``recall``: queries get back what was evicted.
    ``record_attention``: that of the last chunk is kept.
    """

    def __init__(
        self,
        family: RopeDecoder | T5Encoder,
        memories: list[Attendre],
        chunk: int = 128,
        record_attention: bool = False,
        per_head: bool = False,
        recall: Recall | None = None,
    ):
        if len(memories) != len(family.layers):
            raise ValueError(f"{len(memories)} memories for {len(family.layers)} layers")
        self.family, self.chunk, heads = family, chunk, family.key_heads if per_head else 1
        self.read = 0  # positions so far, padding included
        self.held: list[Float[Tensor, "b n e"]] = []  # of each split layer, the residual stream of the queries that wait
        self.decoder = family if isinstance(family, RopeDecoder) and not self.must_split(memories) else None
        self.cache: LayerMemories  # an EvictingCache where the decoder reads with its own code
        if self.decoder is not None:
            self.cache = memories_in_model(self.decoder, memories, chunk, heads, record_attention, recall)
        else:
            layers = [LayerMemory(memory, chunk, family.score, heads, record_attention, recall) for memory in memories]
            self.cache = LayerMemories(layers)

    def must_split(self, memories: list[Attendre]) -> bool:
        """Return whether queries of some layer wait, so that transformers cannot run the decoder's layers."""
        return any(memory.query_size for memory in memories)

    def fork(self, rows: list[int]) -> LongReader:
        """Return a reader of copies of these rows, which may repeat; what either reads from now on is its own."""
        other, index = copy.copy(self), torch.tensor(rows, dtype=torch.long)
        other.cache = self.cache.fork(index)
        other.held = [x[index.to(x.device)] for x in self.held]
        return other

    @torch.no_grad()
    def feed(self, tokens: Int[Tensor, "b l"], position: Int[Tensor, "b l"]) -> Iterator[Hidden]:
        """Read more of the input, at its positions (-1 is padding), and yield the stack's output chunk by chunk."""
        for chunk, at in zip(tokens.split(self.chunk, 1), position.split(self.chunk, 1), strict=True):
            self.read += chunk.shape[1]
            if not chunk.shape[1]:
                return
            if self.decoder is not None:
                yield Hidden(self.decoder.read(chunk, at, self.cache), at)
            else:
                yield self.run_layers(Hidden(self.family.embed(chunk), at))

    def run_layers(self, hidden: Hidden, first: int = 0) -> Hidden:
        """Run a chunk through the split layers from ``first`` on."""
        for number in range(first, len(self.family.layers)):
            columns = self.family.layers[number].project(hidden.x)
            hidden = self.finish_layer(number, hidden.x, *self.cache.memories[number].step(columns, hidden.position))
        return hidden._replace(x=self.family.final_norm(hidden.x))

    def finish_layer(
        self, number: int, x: Float[Tensor, "b l e"], attended: Float[Tensor, "b q h d"], position: Int[Tensor, "b q"]
    ) -> Hidden:
        """Return a layer's output for the queries that attended, which may have waited longer than ``x``, the input."""
        if number == len(self.held):
            self.held.append(x[:, :0])
        x = torch.cat([self.held[number], x], 1)
        leaving, self.held[number] = x[:, : position.shape[1]], x[:, position.shape[1] :]
        return Hidden(self.family.layers[number].finish(leaving, attended.to(x.dtype)), position)

    def rescore_with_question(self, tokens: Int[Tensor, "b l"], position: Int[Tensor, "b l"]) -> None:
        """Let a question attend to all that the memories hold, and take the scores after it; it evicts nothing."""

        def read_with(memories: LayerMemories) -> None:
            other = copy.copy(self)
            other.cache, other.held, other.chunk = memories, [*self.held], tokens.shape[1]
            for _ in other.feed(tokens, position):
                pass

        self.cache.rescore_with_question(tokens.shape[1], read_with)

    def set_query_sizes(self, sizes: list[int]) -> None:
        """Give the layers query memories of these sizes."""
        for layer, size in zip(self.cache.memories, sizes, strict=True):
            layer.memory = replace(layer.memory, query_size=size)

    def end(self, how: str) -> Iterator[Hidden]:
        """Let all waiting queries attend, by ``flush`` or ``drain``; queries of later (generated) tokens attend at once."""
        if self.held:
            yield from {"flush": self.flush, "drain": self.drain}[how]()
            self.set_query_sizes([0] * len(self.cache.memories))

    @torch.no_grad()
    def flush(self) -> Iterator[Hidden]:
        """Let all waiting queries attend, one layer after another; the next layers read a layer's output as one chunk."""
        for number, layer in enumerate(self.cache.memories):
            waiting = self.held[number]
            if waiting.shape[1]:
                hidden = self.finish_layer(number, waiting[:, :0], *layer.release(waiting.shape[1]))
                yield self.run_layers(hidden, number + 1)

    @torch.no_grad()
    def drain(self) -> Iterator[Hidden]:
        """Push out waiting queries with chunks of padding: as many positions as all query memories hold."""
        sizes = [min(layer.memory.query_size, self.read) for layer in self.cache.memories]
        self.set_query_sizes(sizes)
        padding = self.held[0].new_zeros(len(self.held[0]), self.chunk, self.held[0].shape[2])
        position = torch.full(padding.shape[:2], -1, device=padding.device)
        for _ in range(-(-sum(sizes) // self.chunk)):
            yield self.run_layers(Hidden(padding, position))
