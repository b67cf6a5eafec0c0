"""SRU++ (Lei 2021): in every layer attention of a narrow width feeds SRU's recurrence; states and a cache are carried on.

A layer's g, what memories are keyed by, is what it projects the recurrence's input from: its only wide matrix stands where
a Transformer has the feed-forward block. Deviation: the cache holds the last segment's inputs as they were normalised; the
published code caches them raw, and normalises those of the segment itself alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from trime.kernels.cpu import attend
from trime.memory.bounded import BoundedMemory, MemoryState
from trime.memory.distributed import as_full_tensor
from trime.models.attention_trace import AttentionTrace
from trime.models.backbones.segment_cache import CacheAndSegment, concat_cache, update_cache
from trime.models.backbones.srupp.recurrence import recurrence
from trime.models.backbones.stateful import StatefulBackbone, refuse_padding, unsharded_zeros
from trime.models.layers.attention import head_width
from trime.models.layers.embeddings import AdaptiveInput, PlainInput
from trime.types import Bool, Float, Int, Tensor

HIGHWAY_BIAS = -2.0  # at first layers hand most of their input on


class Sizes(NamedTuple):
    """Of a layer; ``inner`` is the attention's width d'."""

    width: int
    inner: int
    heads: int
    dropout: float
    attention_dropout: float


class Carried(NamedTuple):
    """The recurrence's c, and the cache of normalised inputs."""

    cell: Float[Tensor, "b d"]
    cache: MemoryState


class SruLayer(nn.Module):
    """q = W1 norm(x), k and v = W2 q; u = W3 norm(q + alpha attention(q, k, v)); h = recurrence(u, x) (their section 3)."""

    def __init__(self, sizes: Sizes, cache: BoundedMemory, last: bool):
        super().__init__()
        width, inner = sizes.width, sizes.inner
        head_width(inner, sizes.heads)
        self.heads, self.width, self.cache, self.attention_dropout = sizes.heads, inner, cache, sizes.attention_dropout
        self.highway_dropout = 0.0 if last else sizes.dropout
        self.attention_trace: list[AttentionTrace] | None = None
        self.norm, self.inner_norm, self.dropout = nn.LayerNorm(width), nn.LayerNorm(inner), nn.Dropout(sizes.dropout)
        self.inward, self.remembered = nn.Linear(width, inner, bias=False), nn.Linear(inner, 2 * inner, bias=False)
        self.outward = nn.Linear(inner, 3 * width, bias=False)
        for layer in (self.inward, self.remembered, self.outward):
            nn.init.xavier_uniform_(layer.weight)
        self.outward.weight.data *= math.sqrt(1 - sizes.dropout)
        self.alpha = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.empty(2, width).uniform_(-math.sqrt(1.5), math.sqrt(1.5)))
        self.bias = nn.Parameter(torch.tensor([[0.0], [HIGHWAY_BIAS]]).repeat(1, width))

    @property
    def stateful_module(self) -> SruLayer:
        return self

    def start(self, rows: int) -> Carried:
        """A state of zeros and an empty cache."""
        nothing = unsharded_zeros(self.weight, rows, 0, self.weight.shape[1])
        return Carried(unsharded_zeros(self.weight, rows, self.weight.shape[1]), self.cache.empty((nothing,)))

    def reset(self, carried: Carried, rows: Bool[Tensor, " b"]) -> Carried:
        """Without what some rows carry."""
        return Carried(carried.cell.masked_fill(rows[:, None], 0), self.cache.reset(carried.cache, rows))

    def training_metrics(self) -> dict[str, Tensor]:
        """What attention weighs beside its queries."""
        return {"alpha/layer": as_full_tensor(self.alpha.detach()).squeeze(0)}

    def forward(
        self, x: Float[Tensor, "b l d"], carried: Carried, position: Int[Tensor, "b l"]
    ) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b l e"], Carried]:
        """h, g, and what is carried on."""
        normal = self.norm(x)
        context = concat_cache(carried.cache, normal, position)
        projected = self.inward(context.states)
        query = projected[:, -x.shape[1] :]
        mixed, logits = self.attended(query, projected, context, position)
        g = self.inner_norm(query + self.alpha * mixed)
        mask = F.dropout(x.new_ones(len(x), x.shape[2]), self.highway_dropout, self.training)
        h, cells = recurrence(self.outward(self.dropout(g)), x, self.weight, self.bias, mask, carried.cell)
        held = update_cache(self.cache, carried.cache, normal, position, logits, context.slot)
        return h, g, Carried(cells[:, -1].detach(), held)

    def attended(
        self,
        query: Float[Tensor, "b l e"],
        projected: Float[Tensor, "b k e"],
        context: CacheAndSegment,
        position: Int[Tensor, "b l"],
    ) -> tuple[Float[Tensor, "b l e"], Tensor | None]:
        """softmax(q k / sqrt(d_h)) v over cache and segment, and the logits where a policy or an explanation wants them."""
        key, value = projected_heads(self.remembered(projected), 2, self.heads)
        (wanted,) = projected_heads(query, 1, self.heads)
        seen = context.seen(position)
        dropout = self.attention_dropout if self.training else 0.0
        mixed = attend(wanted, key, value, seen, dropout).transpose(1, 2).flatten(2)
        if not self.cache.policy.uses_attention and self.attention_trace is None:
            return mixed, None
        with torch.no_grad():
            logits = wanted @ key.transpose(-1, -2) / math.sqrt(key.shape[-1])
            logits = logits.masked_fill(~seen, -torch.inf)
            if self.attention_trace is not None:
                self.attention_trace[:] = [context.attention_trace(logits.softmax(-1))]
        return mixed, logits


def projected_heads(x: Float[Tensor, "b k e"], parts: int, heads: int) -> Tensor:
    """[parts b h k d]."""
    return x.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4)


def srupp(
    embedding: AdaptiveInput | PlainInput,
    layers: int,
    heads: int,
    inner: int,
    positions: int,
    memory: BoundedMemory,
    dropout: float = 0.0,
    inner_dropout: float = 0.0,
    final_norm: bool = False,
    pad: int | None = None,
) -> StatefulBackbone:
    """``layers`` layers whose attention has width ``inner`` and whose caches are like ``memory``; no norm at the end.

    ``inner_dropout`` is of attention weights. Embeddings are not scaled, as published.
    """
    refuse_padding(pad)
    sizes = Sizes(embedding.width, inner, heads, dropout, inner_dropout)
    every = [SruLayer(sizes, memory, number == layers - 1) for number in range(layers)]
    norm = [nn.LayerNorm(embedding.width)] if final_norm else []
    return StatefulBackbone(embedding, every, positions, dropout, nn.Sequential(*norm, nn.Dropout(dropout)), scale=1.0)
