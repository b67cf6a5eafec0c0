"""The Memorizing Transformer (Wu et al. 2022): kNN-augmented attention over keys and values of past segments.

Every layer attends to a sliding window with T5's position bias; the chosen ones also look up their queries
in a memory of the row's document, which a learned gate of each head mixes in (their Eq. 1 and 2). A segment
first reads, then its own keys and values are written, as constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn

from trime.memory.bounded import Held
from trime.models.attention import feed_forward
from trime.models.embeddings import AdaptiveInput, PlainInput
from trime.models.kv_memory import KeyValueMemory
from trime.models.relative import RelativeBias
from trime.models.sliding import Cache, Window, sliding_attention
from trime.types import Bool, Encoding, Float, Int, Tensor

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@dataclass(frozen=True)
class Form:
    """What the official layer has otherwise than this project's: RMS norms, no biases, normalised queries and keys.

    ``normalize``: queries and keys have length 1, and each head a learned scale instead of 1/sqrt(d).
    ``head_width``: of queries, keys and values; null: the width over the number of heads.
    """

    norm: str = "layer"
    biases: bool = True
    normalize: bool = False
    head_width: int | None = None

    def of_head(self, width: int, heads: int) -> int:
        """Width of a head."""
        if self.head_width is None and width % heads:
            raise ValueError(f"width={width} is not a multiple of heads={heads}: choose model.backbone.heads to divide it")
        return self.head_width or width // heads


class State(NamedTuple):
    """What a row carries from segment to segment: a cache for each layer, the memories, its next position."""

    caches: tuple[Cache, ...]
    memories: tuple[Held, ...]
    position: Int[Tensor, " b"]


class Attention(nn.Module):
    """Local attention, and in layers that have one, attention to a memory."""

    def __init__(self, width: int, heads: int, dropout: float, window: Window, form: Form, memory: KeyValueMemory | None):
        super().__init__()
        d = form.of_head(width, heads)
        self.heads, self.dropout, self.window = heads, dropout, window
        self.memory = memory
        self.inward = nn.Linear(width, 3 * heads * d, bias=form.biases)  # query, key, value
        self.outward = nn.Linear(heads * d, width, bias=form.biases)
        self.bias = RelativeBias(heads)
        self.scale = nn.Parameter(torch.full((heads,), d**0.5)) if form.normalize else None
        for part in self.inward.weight.chunk(3):
            nn.init.xavier_uniform_(part, gain=2**-0.5)
        nn.init.xavier_uniform_(self.outward.weight)
        if form.biases:
            nn.init.zeros_(self.outward.bias)

    def forward(
        self, x: Float[Tensor, "b l d"], cache: Cache, held: Held | None, position: Int[Tensor, "b l"]
    ) -> tuple[Float[Tensor, "b l d"], Cache, Held | None]:
        """Attended values, and what the next segment finds."""
        query, key, value = self.inward(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed, cache, held = self.attended(x, (query, key, value), cache, held, position)
        return self.outward(mixed.transpose(1, 2).flatten(2)), cache, held

    def attended(
        self,
        x: Float[Tensor, "b l e"],
        own: tuple[Float[Tensor, "b h l d"], Float[Tensor, "b h l d"], Float[Tensor, "b h l d"]],
        cache: Cache,
        held: Held | None,
        position: Int[Tensor, "b l"],
    ) -> tuple[Float[Tensor, "b h l d"], Cache, Held | None]:
        """The same for given queries, keys and values; ``x`` is what a gate by content reads."""
        (query, key), scale = self.scaled(own[0], own[1])
        dropout = self.dropout if self.training else 0.0
        local = sliding_attention(query, (key, own[2]), cache, (self.bias, scale), self.window, dropout)
        if self.memory is not None and held is not None:
            remembered, held = self.memory.read(query, held, position)
            held = self.memory.write(held, (key, own[2]), position)
            local = torch.lerp(local, remembered, self.memory.gate(x).expand_as(local))
        return local, cache.pushed(key, own[2]), held

    def scaled(self, query: Tensor, key: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Queries that carry the scale, keys, and the scale of the position bias."""
        if self.scale is None:
            return (query / query.shape[-1] ** 0.5, key), query.new_ones(1)
        scale = self.scale.abs()
        return (unit(query) * scale[:, None, None], unit(key)), scale


def unit(x: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    """Of length 1, as the official code has it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class Layer(nn.Module):
    """x += attention(norm(x)); x += feed_forward(norm(x)). The second norm's output is the layer's g."""

    def __init__(self, attention: Attention, width: int, inner: int, dropout: float, inner_dropout: float, form: Form):
        super().__init__()
        self.attention_norm, self.feed_norm = (NORMS[form.norm](width, eps=1e-6) for _ in range(2))
        self.attention = attention
        self.feed = feed_forward(width, inner, inner_dropout, form.biases)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "b l d"], cache: Cache, held: Held | None, position: Int[Tensor, "b l"]
    ) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b l d"], Cache, Held | None]:
        """The layer's output, the input of its feed-forward block, and what the next segment finds."""
        mixed, cache, held = self.attention(self.attention_norm(x), cache, held, position)
        x = x + self.dropout(mixed)
        g = self.feed_norm(x)
        return x + self.dropout(self.feed(g)), g, cache, held


class MemorizingTransformer(nn.Module):
    """``layers`` layers over a sliding window, those of ``memory_layers`` with a memory; no absolute positions.

    ``memory`` builds a layer's memory from its heads and width. ``memory_layers`` counts from 0; null: one,
    three quarters up (the 9th of 12). ``positions`` is the longest segment.
    """

    carries = True

    def __init__(
        self,
        embedding: AdaptiveInput | PlainInput,
        layers: int,
        heads: int,
        inner: int,
        positions: int,
        memory: Callable[..., KeyValueMemory],
        window: Window,
        dropout: float = 0.0,
        inner_dropout: float = 0.0,
        final_norm: bool = True,
        form: Form | None = None,
        memory_layers: list[int] | None = None,
        pad: int | None = None,
    ):
        super().__init__()
        if pad is not None:
            raise ValueError("compatibility.padding is a quirk of the Transformer: set compatibility=none")
        form = form or Form()
        chosen = [math.ceil(layers * 3 / 4) - 1] if memory_layers is None else memory_layers
        if not set(chosen) <= set(range(layers)):
            raise ValueError(f"memory_layers={chosen}: name layers 0..{layers - 1}, as model.backbone.layers has them")
        width = embedding.width
        self.embedding, self.positions, self.width, self.window = embedding, positions, width, window
        self.memory_layers, self.heads = sorted(chosen), heads
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList()
        for number in range(layers):
            own = memory(heads=heads, width=width) if number in chosen else None
            attention = Attention(width, heads, inner_dropout, window, form, own)
            self.layers.append(Layer(attention, width, inner, dropout, inner_dropout, form))
        self.final_norm = NORMS[form.norm](width) if final_norm else nn.Identity()

    def layer(self, number: int) -> Layer:
        return cast(Layer, self.layers[number])

    def memory(self, number: int) -> KeyValueMemory:
        """The memory of a layer that has one."""
        found = self.layer(number).attention.memory
        assert found is not None
        return found

    def start(self, rows: int) -> State:
        """The state of rows that have read nothing."""
        weight = self.layer(0).attention.outward.weight
        like = weight.new_zeros(rows, self.heads, 0, weight.shape[1] // self.heads)
        caches = tuple(Cache.empty(like, self.window.length) for _ in self.layers)
        memories = tuple(self.memory(number).start(like) for number in self.memory_layers)
        return State(caches, memories, torch.zeros(rows, dtype=torch.long, device=like.device))

    def reset(self, state: State, rows: Bool[Tensor, " b"]) -> State:
        """Forgets everything of some rows."""
        if not rows.any():
            return state
        pairs = zip(self.memory_layers, state.memories, strict=True)
        memories = tuple(self.memory(number).reset(held, rows) for number, held in pairs)
        return State(tuple(cache.reset(rows) for cache in state.caches), memories, state.position.masked_fill(rows, 0))

    def forward(
        self, tokens: Int[Tensor, "b l"], state: State | None, fresh: Bool[Tensor, " b"] | None = None
    ) -> tuple[Encoding, State]:
        """Encodes the next segment of each row; rows that are ``fresh`` start a document."""
        length = tokens.shape[1]
        if length > self.positions:
            raise ValueError(f"a row of {length} tokens exceeds model.backbone.positions={self.positions}")
        state = self.start(len(tokens)) if state is None else state
        state = state if fresh is None else self.reset(state, fresh)
        position = state.position[:, None] + torch.arange(length, device=tokens.device)
        x = g = self.dropout(math.sqrt(self.width) * self.embedding(tokens))
        held, caches = dict(zip(self.memory_layers, state.memories, strict=True)), []
        for number, layer in enumerate(self.layers):
            x, g, cache, after = layer(x, state.caches[number], held.get(number), position)
            caches.append(cache)
            if after is not None:
                held[number] = after
        memories = tuple(held[number] for number in self.memory_layers)
        return Encoding(self.final_norm(x), g), State(tuple(caches), memories, state.position + length)

    def figures(self) -> dict[str, Tensor]:
        """Each head's share of memory, sigmoid(b_g), by layer and head."""
        gates = ((number, self.memory(number).bias.detach().sigmoid()) for number in self.memory_layers)
        return {f"gate/layer{number}/head{head}": share for number, gate in gates for head, share in enumerate(gate)}
