"""The Memorizing Transformer (Wu et al. 2022): kNN-augmented attention over keys and values of past segments.

Every layer attends to a sliding window with T5's position bias; the chosen ones also look up their queries
in a memory of the row's document, which a learned gate of each head mixes in (their Eq. 1 and 2). A segment
first reads, then its own keys and values are written, as constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from trime.memory.distributed import as_full_tensor
from trime.models.attention_trace import AttentionTrace
from trime.models.backbones.memorizing.kv_memory import KeyValueMemory, KeyValueState
from trime.models.backbones.stateful import NORMS, Layer, LayerSizes, StatefulBackbone, refuse_padding, unsharded_zeros
from trime.models.layers.attention import head_width
from trime.models.layers.embeddings import AdaptiveInput, PlainInput
from trime.models.layers.relative import RelativeBias
from trime.models.layers.sliding import Cache, Window, sliding_attention
from trime.types import Bool, Float, Int, Tensor


@dataclass(frozen=True)
class AttentionConfig:
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
        return self.head_width or head_width(width, heads)


class AttentionState(NamedTuple):
    """What an attention layer carries on: the window's keys and values, and its memory, if it has one."""

    cache: Cache
    memory: tuple[KeyValueState, ...]


class Attention(nn.Module):
    """Local attention, and in layers that have one, attention to a memory."""

    def __init__(
        self, width: int, heads: int, dropout: float, window: Window, form: AttentionConfig, memory: KeyValueMemory | None
    ):
        super().__init__()
        d = form.of_head(width, heads)
        self.heads, self.dropout, self.window = heads, dropout, window
        self.memory = memory
        self.attention_trace: list[AttentionTrace] | None = None
        self.inward = nn.Linear(width, 3 * heads * d, bias=form.biases)  # query, key, value
        self.outward = nn.Linear(heads * d, width, bias=form.biases)
        self.bias = RelativeBias(heads)
        self.scale = nn.Parameter(torch.full((heads,), d**0.5)) if form.normalize else None
        for part in self.inward.weight.chunk(3):
            nn.init.xavier_uniform_(part, gain=2**-0.5)
        nn.init.xavier_uniform_(self.outward.weight)
        if form.biases:
            nn.init.zeros_(self.outward.bias)

    def start(self, rows: int) -> AttentionState:
        """Nothing yet."""
        weight = self.outward.weight
        like = unsharded_zeros(weight, rows, self.heads, 0, weight.shape[1] // self.heads)
        return AttentionState(Cache.empty(like, self.window.length), () if self.memory is None else (self.memory.start(like),))

    def reset(self, carried: AttentionState, rows: Bool[Tensor, " b"]) -> AttentionState:
        """Without what some rows carry."""
        memory = () if self.memory is None else (self.memory.reset(carried.memory[0], rows),)
        return AttentionState(carried.cache.reset(rows), memory)

    def forward(
        self, x: Float[Tensor, "b l d"], carried: AttentionState, position: Int[Tensor, "b l"]
    ) -> tuple[Float[Tensor, "b l d"], AttentionState]:
        """Attended values, and what the next segment finds."""
        mixed, carried = self.attend(x, self.project(x), carried, position)
        return self.outward(mixed.transpose(1, 2).flatten(2)), carried

    def project(self, x: Float[Tensor, "b l d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [b h l d]."""
        query, key, value = self.inward(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return query, key, value

    def attend(
        self,
        x: Float[Tensor, "b l e"],
        own: tuple[Float[Tensor, "b h l d"], Float[Tensor, "b h l d"], Float[Tensor, "b h l d"]],
        carried: AttentionState,
        position: Int[Tensor, "b l"],
    ) -> tuple[Float[Tensor, "b h l d"], AttentionState]:
        """The same for given queries, keys and values; ``x`` is what a gate by content reads."""
        (query, key), scale = self.normalize_and_scale(own[0], own[1])
        dropout = self.dropout if self.training else 0.0
        mixed = sliding_attention(query, (key, own[2]), carried.cache, (self.bias, scale), self.window, dropout)
        held = carried.memory
        if self.memory is not None:
            with torch.autocast(x.device.type, enabled=False):  # what is found first must be the best
                asked = query.to(held[0].held.columns[0].dtype)
                remembered, after = self.memory.read(asked, held[0], position)
            held = (self.memory.write(after, (asked, key, own[2]), position),)
            gate = self.memory.gate(x).to(mixed.dtype)
            if self.attention_trace is not None:
                self.attention_trace[:] = self.memory.attention_trace(asked[:, :, -1:], carried.memory[0], after, gate[:, :, -1:])
            mixed = torch.lerp(mixed, remembered.to(mixed.dtype), gate.expand_as(mixed))
        return mixed, AttentionState(carried.cache.append(key, own[2]), held)

    def normalize_and_scale(self, query: Tensor, key: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Queries that carry the scale, keys, and the scale of the position bias."""
        if self.scale is None:
            return (query / query.shape[-1] ** 0.5, key), query.new_ones(1)
        scale = self.scale.abs()
        return (unit(query) * scale[:, None, None], unit(key)), scale

    def training_metrics(self) -> dict[str, Tensor]:
        """Each head's share of memory, sigmoid(b_g)."""
        if self.memory is None:
            return {}
        return {f"gate/layer/head{head}": share for head, share in enumerate(as_full_tensor(self.memory.bias.detach()).sigmoid())}


def unit(x: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    """Of length 1, as the official code has it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def memorizing_transformer(
    embedding: AdaptiveInput | PlainInput,
    layers: int,
    heads: int,
    inner: int,
    positions: int,
    memory: Callable[..., KeyValueMemory],
    window: Window,
    form: AttentionConfig,
    dropout: float = 0.0,
    inner_dropout: float = 0.0,
    final_norm: bool = True,
    memory_layers: list[int] | None = None,
    pad: int | None = None,
) -> StatefulBackbone:
    """``layers`` layers over a sliding window, those of ``memory_layers`` with a memory; no absolute positions.

    ``memory`` builds a layer's memory from its heads and width. ``memory_layers`` counts from 0; null: one,
    three quarters up (the 9th of 12).
    """
    refuse_padding(pad)
    chosen = [math.ceil(layers * 3 / 4) - 1] if memory_layers is None else memory_layers
    if not isinstance(chosen, list) or form.norm not in NORMS or window.length < 1:
        raise ValueError(
            f"memory_layers={chosen} must be a list of layers, form.norm={form.norm} one of {', '.join(NORMS)}, "
            f"window.length={window.length} at least 1"
        )
    if not set(chosen) <= set(range(layers)):
        raise ValueError(f"memory_layers={chosen}: name layers 0..{layers - 1}, as model.backbone.layers has them")
    sizes = LayerSizes(embedding.width, inner, dropout, inner_dropout)

    def layer(number: int) -> Layer:
        own = memory(heads=heads, width=sizes.width) if number in chosen else None
        return Layer(Attention(sizes.width, heads, inner_dropout, window, form, own), sizes, form.norm, form.biases)

    last = NORMS[form.norm](sizes.width) if final_norm else nn.Identity()
    return StatefulBackbone(embedding, [layer(number) for number in range(layers)], positions, dropout, last)
