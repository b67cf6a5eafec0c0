"""The Memorizing Transformer (Wu et al. 2022): kNN-augmented attention over keys and values of past segments.

Every layer attends to a sliding window with T5's position bias; the chosen layers also look up their queries in a memory of
the row's document, and a learned gate of each head mixes the result in (their Eq. 1 and 2). A segment first reads the
memory; then its own keys and values are written, detached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from trime.common.types import Bool, Float, Int, Tensor
from trime.layers.attention import AttentionTrace, head_width, split_heads
from trime.layers.embeddings import AdaptiveInput, PlainInput
from trime.layers.sliding import Cache, RelativeBias, SlidingWindow, sliding_attention
from trime.models.backbones.kv_memory import KeyValueMemory, KeyValueState
from trime.models.backbones.stateful import (
    NORMS,
    StatefulBackbone,
    StatefulTransformerLayer,
    refuse_padding,
    unsharded_zeros,
)
from trime.token_memory.train.distributed import as_full_tensor


@dataclass(frozen=True)
class AttentionConfig:
    """Options of the official layer that this package's differs in: RMS norms, no biases, normalized queries and keys."""

    norm: str = "layer"
    biases: bool = True
    normalize: bool = False  # queries and keys to length 1; each head then learns a scale instead of 1/sqrt(d)
    head_width: int | None = None  # of queries, keys and values; None: the model's width / heads


class AttentionState(NamedTuple):
    """The state of an attention layer: the window's keys and values, and its memory, if it has one."""

    cache: Cache
    memory: tuple[KeyValueState, ...]


class KNNAttention(nn.Module):
    """Local attention and, in layers with a memory, attention to it."""

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float,
        window: SlidingWindow,
        config: AttentionConfig,
        memory: KeyValueMemory | None,
    ):
        super().__init__()
        d = config.head_width or head_width(width, heads)
        self.heads, self.dropout, self.window = heads, dropout, window
        self.memory = memory
        self.attention_traces: list[AttentionTrace] | None = None
        self.qkv_proj = nn.Linear(width, 3 * heads * d, bias=config.biases)  # query, key, value
        self.out_proj = nn.Linear(heads * d, width, bias=config.biases)
        self.bias = RelativeBias(heads)
        # Normalized products lie in [-1, 1]: a learned scale makes the softmax sharp again.
        self.scale = nn.Parameter(torch.full((heads,), d**0.5)) if config.normalize else None
        for projection in self.qkv_proj.weight.chunk(3):
            nn.init.xavier_uniform_(projection, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if config.biases:
            nn.init.zeros_(self.out_proj.bias)

    def initial_state(self, rows: int) -> AttentionState:
        weight = self.out_proj.weight
        like = unsharded_zeros(weight, rows, self.heads, 0, weight.shape[1] // self.heads)
        memory = () if self.memory is None else (self.memory.initial_state(like),)
        return AttentionState(Cache.empty(like, self.window.length), memory)

    def reset(self, state: AttentionState, rows: Bool[Tensor, " b"]) -> AttentionState:
        memory = () if self.memory is None else (self.memory.reset(state.memory[0], rows),)
        return AttentionState(state.cache.reset(rows), memory)

    def forward(
        self, x: Float[Tensor, "b l d"], state: AttentionState, position: Int[Tensor, "b l"], kept: list[Cache] | None = None
    ) -> tuple[Float[Tensor, "b l d"], AttentionState]:
        if kept:
            state = state._replace(cache=kept[0])  # the window slides on within a segment, and the memory stays
        attended, state = self.attend(x, self.project(x), state, position)
        if kept is not None:
            kept[:] = [state.cache]
        return self.out_proj(attended.transpose(1, 2).flatten(2)), state

    def project(self, x: Float[Tensor, "b l d"]) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = split_heads(self.qkv_proj(x), 3, self.heads)  # [b h l d] each
        return query, key, value

    def attend(
        self,
        x: Float[Tensor, "b l e"],
        projections: tuple[Float[Tensor, "b h l d"], Float[Tensor, "b h l d"], Float[Tensor, "b h l d"]],
        state: AttentionState,
        position: Int[Tensor, "b l"],
    ) -> tuple[Float[Tensor, "b h l d"], AttentionState]:
        """Return attended values of queries, keys and values, and the new state; a content gate reads ``x``."""
        query, key, value = projections
        (query, key), scale = self.normalize_and_scale(query, key)
        dropout = self.dropout if self.training else 0.0
        attended = sliding_attention(query, (key, value), state.cache, (self.bias, scale), self.window, dropout)
        remembers = state.memory
        if self.memory is not None:
            (memory,) = state.memory
            with torch.autocast(x.device.type, enabled=False):  # rounded scores would not be in order
                memory_query = query.to(memory.entries.columns[0].dtype)
                remembered, entries = self.memory.read(memory_query, memory, position)
            remembers = (self.memory.write(entries, (memory_query, key, value), position),)
            gate = self.memory.gate(x).to(attended.dtype)
            if self.attention_traces is not None:
                last = memory_query[:, :, -1:], memory, entries, gate[:, :, -1:]
                self.attention_traces[:] = self.memory.attention_traces(*last)
            attended = torch.lerp(attended, remembered.to(attended.dtype), gate.expand_as(attended))
        return attended, AttentionState(state.cache.append(key, value), remembers)

    def normalize_and_scale(self, query: Tensor, key: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return scaled queries, keys, and the scale of the position bias."""
        if self.scale is None:
            return (query / query.shape[-1] ** 0.5, key), query.new_ones(1)
        scale = self.scale.abs()
        return (normalize(query) * scale[:, None, None], normalize(key)), scale

    def training_metrics(self) -> dict[str, Tensor]:
        """Return each head's share of the memory, sigmoid(b_g)."""
        if self.memory is None:
            return {}
        shares = as_full_tensor(self.memory.bias.detach()).sigmoid()
        return {f"gate/head{head}": share for head, share in enumerate(shares)}


def normalize(x: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    """Return x with length 1, as in the official code."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def memorizing_transformer(
    embedding: AdaptiveInput | PlainInput,
    layers: int,
    heads: int,
    inner: int,
    positions: int,
    memory: Callable[..., KeyValueMemory],
    window: SlidingWindow,
    attention: AttentionConfig,
    dropout: float = 0.0,
    inner_dropout: float = 0.0,
    final_norm: bool = True,
    memory_layers: list[int] | None = None,
    pad: int | None = None,
) -> StatefulBackbone:
    """Build the Memorizing Transformer; ``memory`` builds that of a layer, in ``memory_layers`` (from 0; None: one at 3/4)."""
    refuse_padding(pad)
    # The 9th of 12, as in the paper.
    chosen = [math.ceil(layers * 3 / 4) - 1] if memory_layers is None else memory_layers
    if not isinstance(chosen, list) or attention.norm not in NORMS or window.length < 1:
        raise ValueError(
            f"memory_layers={chosen} must be a list of layers, attention.norm={attention.norm} one of {', '.join(NORMS)}, "
            f"window.length={window.length} at least 1"
        )
    if not set(chosen) <= set(range(layers)):
        raise ValueError(f"memory_layers={chosen}: name layers 0..{layers - 1}, as model.backbone.layers has them")
    width = embedding.width
    built = []
    for number in range(layers):
        layer_memory = memory(heads=heads, width=width) if number in chosen else None
        module = KNNAttention(width, heads, inner_dropout, window, attention, layer_memory)
        built.append(StatefulTransformerLayer(module, width, inner, dropout, inner_dropout, attention.norm, attention.biases))
    norm = NORMS[attention.norm](width) if final_norm else nn.Identity()
    return StatefulBackbone(embedding, built, positions, dropout, norm)
