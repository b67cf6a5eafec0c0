"""Transformer-XL (Dai et al. 2019): relative positions, and in every layer a cache of the previous segments' hidden states.

The cache is a bounded memory: with first-in-first-out eviction it is the published one, with another policy it keeps the
states that attention asks for. Deviation: norms come before the blocks, as in all backbones of this package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trime.common.types import Bool, Float, Int, Tensor
from trime.kv.bounded import BoundedMemory, MemoryState
from trime.layers.attention import AttentionTrace, head_width, split_heads
from trime.layers.embeddings import AdaptiveInput, PlainInput, sinusoids
from trime.models.backbones.stateful import (
    StatefulBackbone,
    StatefulTransformerLayer,
    concat_cache,
    joined,
    refuse_padding,
    unsharded_zeros,
    update_cache,
)


class RelativeAttention(nn.Module):
    """Attention with logits (q + u) k + (q + v) W r over cache and segment; r: sinusoids of the distance (section 3.3).

    Distances above ``longest`` count as ``longest``, because a policy may keep states from far back.
    """

    def __init__(self, width: int, heads: int, dropout: float, cache: BoundedMemory, longest: int):
        super().__init__()
        d = head_width(width, heads)
        self.heads, self.dropout, self.cache = heads, nn.Dropout(dropout), cache
        self.attention_traces: list[AttentionTrace] | None = None
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.kv_proj = nn.Linear(width, 2 * width)  # key, value
        self.r_proj = nn.Linear(width, width, bias=False)
        self.content_bias, self.position_bias = (nn.Parameter(torch.zeros(heads, 1, d)) for _ in range(2))  # u, v
        self.sinusoids: Tensor
        self.register_buffer("sinusoids", sinusoids(longest + 1, width, 0), persistent=False)
        for layer in (self.q_proj, self.kv_proj, self.r_proj, self.out_proj):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(self.out_proj.bias)

    def initial_state(self, rows: int) -> MemoryState:
        return self.cache.empty((unsharded_zeros(self.out_proj.weight, rows, 0, self.out_proj.weight.shape[0]),))

    def reset(self, state: MemoryState, rows: Bool[Tensor, " b"]) -> MemoryState:
        return self.cache.reset(state, rows)

    def training_metrics(self) -> dict[str, Tensor]:
        return {}

    def forward(
        self, x: Float[Tensor, "b l d"], state: MemoryState, position: Int[Tensor, "b l"], kept: list[Tensor] | None = None
    ) -> tuple[Float[Tensor, "b l d"], MemoryState]:
        context = concat_cache(state, joined(kept, x), position)
        key, value = split_heads(self.kv_proj(context.states), 2, self.heads)
        (query,) = split_heads(self.q_proj(x), 1, self.heads)
        logits = (query + self.content_bias) @ key.transpose(-1, -2)
        distance = position[:, :, None] - context.position[:, None]
        logits = logits + self.distance_logits(query + self.position_bias, distance)
        logits = (logits / query.shape[-1] ** 0.5).masked_fill(~context.visible(position), -torch.inf)
        weight = logits.softmax(-1)
        if self.attention_traces is not None:
            self.attention_traces[:] = [context.attention_trace(weight)]
        attended = self.dropout(weight) @ value
        if kept is None:
            state = update_cache(self.cache, state, x, position, logits, context.slot)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), state

    def distance_logits(self, query: Float[Tensor, "b h q d"], distance: Int[Tensor, "b q k"]) -> Float[Tensor, "b h q k"]:
        """Return (q + v) W r. Where the cache is a window, all rows have the same distances, shifted: r is projected once."""
        newest, keys = self.cache.policy.keeps_newest, distance.shape[2]
        r = self.sinusoids[:keys].flip(0) if newest else self.sinusoids
        (projected,) = split_heads(self.r_proj(r)[None], 1, self.heads)
        logits = query @ projected.transpose(-1, -2)
        if not newest:
            return logits.gather(-1, distance.clamp(0, len(r) - 1)[:, None].expand(-1, self.heads, -1, -1))
        # Shift row i left by q - 1 - i, so that column j is the distance of query i to key j; the rest is masked.
        b, h, q, k = logits.shape
        return F.pad(logits, (1, 0)).view(b, h, k + 1, q)[:, :, 1:].reshape(b, h, q, k)


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
    """Build Transformer-XL: ``layers`` layers whose caches are like ``memory``; distances are capped at ``longest``."""
    refuse_padding(pad)
    if memory.policy.keeps_newest:
        # A window never sees farther than this, so that no distance needs a cap.
        longest = max(longest, memory.size + positions)
    built = []
    for _ in range(layers):
        attention = RelativeAttention(embedding.width, heads, inner_dropout, memory, longest)
        built.append(StatefulTransformerLayer(attention, embedding.width, inner, dropout, inner_dropout))
    norm: Any = nn.LayerNorm(embedding.width) if final_norm else nn.Identity()
    return StatefulBackbone(embedding, built, positions, dropout, norm)
