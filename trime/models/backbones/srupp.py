"""SRU++ (Lei 2021): in every layer narrow attention feeds SRU's recurrence, whose state is kept along with a cache.

A layer's g, the key vectors of memories, is projected to the recurrence's input: this only wide matrix takes the place of a
Transformer's feed-forward block. Deviation: the cache holds the last segment's inputs after normalization; the
published code caches them raw, and normalizes only those of the segment itself.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from trime.common.types import Bool, Float, Int, Tensor
from trime.kv.bounded import BoundedMemory, MemoryState
from trime.layers.attention import AttentionTrace, fused_attention, head_width, split_heads
from trime.layers.embeddings import AdaptiveInput, PlainInput
from trime.models.backbones import srupp_cpu
from trime.models.backbones.stateful import (
    StatefulBackbone,
    concat_cache,
    joined,
    refuse_padding,
    unsharded_zeros,
    update_cache,
)
from trime.token_memory.train.distributed import as_full_tensor

HIGHWAY_BIAS = -2.0  # layers pass most of their input through at first


class SruState(NamedTuple):
    """The recurrence's c, and the cache of normalized inputs."""

    cell: Float[Tensor, "b d"]
    cache: MemoryState


class SruLayer(nn.Module):
    """A layer of SRU++ (Lei 2021, section 3).

    q = W1 norm(x) of width ``inner``, k and v = W2 q; u = W3 norm(q + alpha attention(q, k, v)); h = recurrence(u, x).
    """

    def __init__(
        self, width: int, inner: int, heads: int, dropout: float, inner_dropout: float, cache: BoundedMemory, last: bool
    ):
        super().__init__()
        head_width(inner, heads)  # raises where it is no whole number
        self.heads, self.width, self.cache, self.attention_dropout = heads, inner, cache, inner_dropout
        self.highway_dropout = 0.0 if last else dropout
        self.attention_traces: list[AttentionTrace] | None = None
        self.norm, self.inner_norm, self.dropout = nn.LayerNorm(width), nn.LayerNorm(inner), nn.Dropout(dropout)
        self.q_proj, self.kv_proj = nn.Linear(width, inner, bias=False), nn.Linear(inner, 2 * inner, bias=False)
        self.out_proj = nn.Linear(inner, 3 * width, bias=False)
        for layer in (self.q_proj, self.kv_proj, self.out_proj):
            nn.init.xavier_uniform_(layer.weight)
        # Dropout scales its input up: the projection's outputs keep their variance.
        self.out_proj.weight.data *= math.sqrt(1 - dropout)
        self.alpha = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.empty(2, width).uniform_(-math.sqrt(1.5), math.sqrt(1.5)))
        self.bias = nn.Parameter(torch.tensor([[0.0], [HIGHWAY_BIAS]]).repeat(1, width))

    def initial_state(self, rows: int) -> SruState:
        no_states = unsharded_zeros(self.weight, rows, 0, self.weight.shape[1])
        return SruState(unsharded_zeros(self.weight, rows, self.weight.shape[1]), self.cache.empty((no_states,)))

    def reset(self, state: SruState, rows: Bool[Tensor, " b"]) -> SruState:
        return SruState(state.cell.masked_fill(rows[:, None], 0), self.cache.reset(state.cache, rows))

    def training_metrics(self) -> dict[str, Tensor]:
        return {"alpha": as_full_tensor(self.alpha.detach()).squeeze(0)}  # the weight of attention

    def forward(
        self, x: Float[Tensor, "b l d"], state: SruState, position: Int[Tensor, "b l"], kept: list[Tensor] | None = None
    ) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b l e"], SruState]:
        """Return h, g, and the new state; ``kept``: as the backbone has it, for this layer."""
        normed = self.norm(x)
        # The recurrence goes on from its last cell, attention from all inputs of the segment.
        cell, inputs = (kept.pop() if kept else state.cell), joined(kept, normed)
        context = concat_cache(state.cache, inputs, position)
        projected = self.q_proj(context.states)
        query = projected[:, -x.shape[1] :]
        (queries,) = split_heads(query, 1, self.heads)
        key, value = split_heads(self.kv_proj(projected), 2, self.heads)
        visible, logits = context.visible(position), None
        dropout = self.attention_dropout if self.training else 0.0
        attended = fused_attention(queries, key, value, visible, dropout).transpose(1, 2).flatten(2)
        # The fused kernel keeps no logits; some policies and explanations need them.
        if self.cache.policy.uses_attention or self.attention_traces is not None:
            with torch.no_grad():
                logits = queries @ key.transpose(-1, -2) / math.sqrt(key.shape[-1])
                logits = logits.masked_fill(~visible, -torch.inf)
                if self.attention_traces is not None:
                    self.attention_traces[:] = [context.attention_trace(logits.softmax(-1))]
        g = self.inner_norm(query + self.alpha * attended)
        mask = F.dropout(x.new_ones(len(x), x.shape[2]), self.highway_dropout, self.training)
        h, cells = recurrence(self.out_proj(self.dropout(g)), x, self.weight, self.bias, mask, cell)
        if kept is not None:
            kept.append(cells[:, -1])
            return h, g, state
        cache = update_cache(self.cache, state.cache, normed, position, logits, context.slot)
        return h, g, SruState(cells[:, -1].detach(), cache)


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
    """Build SRU++ with attention of width ``inner`` and caches like ``memory``; as published, embeddings are not scaled."""
    refuse_padding(pad)
    sizes = (embedding.width, inner, heads, dropout, inner_dropout)
    sru_layers = [SruLayer(*sizes, memory, number == layers - 1) for number in range(layers)]
    norm = [nn.LayerNorm(embedding.width)] if final_norm else []
    return StatefulBackbone(embedding, sru_layers, positions, dropout, nn.Sequential(*norm, nn.Dropout(dropout)), scale=1.0)


def recurrence(
    u: Float[Tensor, "b l e"],
    x: Float[Tensor, "b l d"],
    weight: Float[Tensor, "2 d"],
    bias: Float[Tensor, "2 d"],
    mask: Float[Tensor, "b d"],
    start: Float[Tensor, "b d"],
) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b l d"]]:
    """Return h and c of all steps of u = u0, u1, u2 side by side (e = 3d) after ``start``; ``mask``: dropout of the highway."""
    if u.dtype == torch.float64 or u.device.type != "cpu":
        return by_steps(u, x, weight, bias, mask, start)
    # The kernels compute in float32, and no gradient of theirs reaches ``start`` or comes through c: states are detached.
    inputs = (tensor.float().contiguous() for tensor in (u, x, weight, bias, mask, start))
    h, c = Recurrence.apply(*inputs)
    return h.to(x.dtype), c


def by_steps(
    u: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, start: Tensor
) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b l d"]]:
    """Return h and c step by step, from the equations; the kernels are tested against this."""
    candidate, forget, highway = u.chunk(3, -1)
    c, cells = start, []
    for step in range(u.shape[1]):
        f = (forget[:, step] + weight[0] * c + bias[0]).sigmoid()
        c = f * c + (1 - f) * candidate[:, step]
        cells.append(c)
    states = torch.stack(cells, 1)
    previous = torch.cat([start[:, None], states[:, :-1]], 1)
    r = (highway + weight[1] * previous + bias[1]).sigmoid()
    return x + r * mask[:, None] * (states - x), states


class Recurrence(torch.autograd.Function):
    """The recurrence by compiled kernels, on the CPU."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        h, c = srupp_cpu.forward(*inputs)
        ctx.save_for_backward(*inputs, c)
        ctx.mark_non_differentiable(c)
        return h, c

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        u, x, weight, bias, mask, start, c = ctx.saved_tensors
        du, dx, rows = srupp_cpu.backward(u, x, weight, bias, mask, start, c, gradient[0].contiguous())
        dweight, dbias = rows.sum(0).chunk(2)
        return du, dx, dweight, dbias, None, None
