"""Transformer-XL (Dai et al. 2019): relative positions, and in every layer a cache of the hidden states before the segment.

The cache is a bounded memory: with first in, first out it is the published one, with another policy it keeps
what attention asks for. Deviation: norms stand before the blocks, as everywhere here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trime.memory.bounded import BoundedMemory, MemoryState
from trime.models.attention_trace import AttentionTrace
from trime.models.backbones.segment_cache import after, laid
from trime.models.backbones.stateful import Layer, Sizes, StatefulBackbone, without_padding, zeros
from trime.models.layers.attention import head_width
from trime.models.layers.embeddings import AdaptiveInput, PlainInput, sinusoids
from trime.types import Bool, Float, Int, Tensor


class RelativeAttention(nn.Module):
    """(q + u) k + (q + v) W r over the cache and the segment, r the sinusoids of the distance (their section 3.3).

    Distances from ``longest`` on count as ``longest``: a policy may keep what lies far behind.
    """

    def __init__(self, width: int, heads: int, dropout: float, cache: BoundedMemory, longest: int):
        super().__init__()
        d = head_width(width, heads)
        self.heads, self.dropout, self.cache = heads, nn.Dropout(dropout), cache
        self.looked: list[AttentionTrace] | None = None
        self.query, self.outward = nn.Linear(width, width), nn.Linear(width, width)
        self.remembered = nn.Linear(width, 2 * width)  # key, value
        self.distant = nn.Linear(width, width, bias=False)
        self.content, self.place = (nn.Parameter(torch.zeros(heads, 1, d)) for _ in range(2))  # u, v
        self.sinusoids: Tensor
        self.register_buffer("sinusoids", sinusoids(longest + 1, width, 0), persistent=False)
        for layer in (self.query, self.remembered, self.distant, self.outward):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(self.outward.bias)

    def start(self, rows: int) -> MemoryState:
        """An empty cache."""
        return self.cache.empty((zeros(self.outward.weight, rows, 0, self.outward.weight.shape[0]),))

    def reset(self, carried: MemoryState, rows: Bool[Tensor, " b"]) -> MemoryState:
        """Without what some rows hold."""
        return self.cache.reset(carried, rows)

    def figures(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def forward(
        self, x: Float[Tensor, "b l d"], carried: MemoryState, position: Int[Tensor, "b l"]
    ) -> tuple[Float[Tensor, "b l d"], MemoryState]:
        """Attended values, and the cache with this segment."""
        around = laid(carried, x, position)
        key, value = self.split(self.remembered(around.states), 2)
        (query,) = self.split(self.query(x), 1)
        logits = (query + self.content) @ key.transpose(-1, -2)
        logits = logits + self.by_distance(query + self.place, around.distance(position))
        logits = (logits / query.shape[-1] ** 0.5).masked_fill(~around.seen(position), -torch.inf)
        weight = logits.softmax(-1)
        if self.looked is not None:
            self.looked[:] = [around.looked(weight)]
        mixed = self.dropout(weight) @ value
        held = after(self.cache, carried, x, position, logits, around.slot)
        return self.outward(mixed.transpose(1, 2).flatten(2)), held

    def split(self, x: Float[Tensor, "b k e"], parts: int) -> Tensor:
        """[parts b h k d]."""
        return x.unflatten(-1, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def by_distance(self, query: Float[Tensor, "b h q d"], distance: Int[Tensor, "b q k"]) -> Float[Tensor, "b h q k"]:
        """(q + v) W r. In a cache that is a window, columns are distances one after the other: rows are but shifted."""
        longest = len(self.sinusoids) - 1
        if self.cache.policy.is_window:
            keys = distance.shape[2]
            (by,) = self.split(self.distant(self.sinusoids[:keys].flip(0))[None], 1)
            return shifted(query @ by.transpose(-1, -2))
        (by,) = self.split(self.distant(self.sinusoids)[None], 1)
        index = distance.clamp(0, longest)[:, None].expand(-1, self.heads, -1, -1)
        return (query @ by.transpose(-1, -2)).gather(-1, index)


def shifted(x: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
    """Row i moved left by q - 1 - i: column j then stands for the distance of query i to key j. The rest is the future's."""
    b, h, q, k = x.shape
    return F.pad(x, (1, 0)).view(b, h, k + 1, q)[:, :, 1:].reshape(b, h, q, k)


def transformer_xl(
    embedding: AdaptiveInput | PlainInput,
    layers: int,
    heads: int,
    inner: int,
    positions: int,
    memory: BoundedMemory,
    dropout: float = 0.0,
    inner_dropout: float = 0.0,
    final_norm: bool = True,
    longest: int = 4096,
    pad: int | None = None,
) -> StatefulBackbone:
    """``layers`` layers whose caches are like ``memory``; ``longest`` is the largest distance that is told from others."""
    without_padding(pad)
    if memory.policy.is_window:
        longest = max(longest, memory.size + positions)
    sizes = Sizes(embedding.width, inner, dropout, inner_dropout)

    def layer() -> Layer:
        return Layer(RelativeAttention(sizes.width, heads, inner_dropout, memory, longest), sizes)

    last: Any = nn.LayerNorm(sizes.width) if final_norm else nn.Identity()
    return StatefulBackbone(embedding, [layer() for _ in range(layers)], positions, dropout, last)
