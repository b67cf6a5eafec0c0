"""Causal self-attention by PyTorch's fused kernels, and the feed-forward block."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trime.common.types import Bool, Float, Int, Tensor
from trime.layers.causal_blocks import CausalBlocks, worth_it

MATH_MAX_KEYS = 256  # keys up to which whole attention matrices are faster with oneDNN; their memory grows with L^2


class CausalAttention(nn.Module):
    """Multi-head attention to a row's own and earlier positions (Vaswani et al. 2017); ``padding`` is hidden.

    ``kept``: keys and values [b h m e] of the positions before these, or an empty list: those of these positions join them.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        head_width(width, heads)
        self.heads, self.dropout = heads, dropout
        self.qkv_proj = nn.Linear(width, 3 * width)  # query, key, value
        self.out_proj = nn.Linear(width, width)
        for projection in self.qkv_proj.weight.chunk(3):
            nn.init.xavier_uniform_(projection, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self, x: Float[Tensor, "b l d"], padding: Bool[Tensor, "b l"] | None = None, kept: list[Tensor] | None = None
    ) -> Float[Tensor, "b l d"]:
        query, key, value = split_heads(self.qkv_proj(x), 3, self.heads)
        dropout = self.dropout if self.training else 0.0
        mask = None
        if kept:
            key, value = (torch.cat(pair, 2) for pair in zip(kept, (key, value), strict=True))
            mask = torch.ones(x.shape[1], key.shape[2], dtype=torch.bool, device=x.device).tril(key.shape[2] - x.shape[1])
        if kept is not None:
            kept[:] = key, value
        if padding is not None:  # it follows a row's tokens, which do not see it anyway: hidden from itself too
            length = padding.shape[1]
            # The first position stays visible, so that no row of the softmax is empty.
            hidden = padding & (torch.arange(length, device=padding.device) > 0)
            mask = ~hidden[:, None, None] & hidden.new_ones(length, length).tril()
        attended = fused_attention(query, key, value, mask, dropout, causal=mask is None)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


def split_heads(x: Float[Tensor, "b l e"], count: int, heads: int) -> Float[Tensor, "{count} b {heads} l d"]:
    """Return projections that share the last axis one by one, divided into heads."""
    return x.unflatten(-1, (count, heads, -1)).permute(2, 0, 3, 1, 4)


def fused_attention(
    query: Float[Tensor, "... l e"],
    key: Float[Tensor, "... m e"],
    value: Float[Tensor, "... m e"],
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "... l e"]:
    """Return softmax(q k^T / sqrt(e)) v by the faster of PyTorch's implementations; arguments are those of its function."""
    if causal and key.shape == query.shape and worth_it(query, dropout):
        return CausalBlocks.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
    on_cpu, allows_bfloat16 = query.device.type == "cpu", torch.get_float32_matmul_precision() == "medium"
    use_math = on_cpu and key.shape[-2] <= MATH_MAX_KEYS and allows_bfloat16  # oneDNN then multiplies whole matrices faster
    with sdpa_kernel(SDPBackend.MATH) if use_math else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=causal, scale=scale)


def head_width(width: int, heads: int) -> int:
    """Return the width of a head; ValueError where the model's width is not a multiple of the number of heads."""
    if width % heads:
        raise ValueError(f"width={width} is not a multiple of heads={heads}: choose model.backbone.heads to divide it")
    return width // heads


def feed_forward(width: int, inner: int, dropout: float, biases: bool = True) -> nn.Sequential:
    """Return the feed-forward block: linear, ReLU, dropout, linear."""
    up_proj, down_proj = nn.Linear(width, inner, bias=biases), nn.Linear(inner, width, bias=biases)
    for layer in (up_proj, down_proj):
        nn.init.xavier_uniform_(layer.weight)
        if biases:
            nn.init.zeros_(layer.bias)
    return nn.Sequential(up_proj, nn.ReLU(), nn.Dropout(dropout), down_proj)


def hide_(logits: Float[Tensor, "b h q m"], hidden: Bool[Tensor, "b 1 q m"]) -> Float[Tensor, "b h q m"]:
    """Make the logits of hidden entries -inf, in place: by an addition, which is several times as fast as ``masked_fill_``."""
    return logits.add_(logits.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf))


class AttentionTrace(NamedTuple):
    """The attention of each row's last query to a memory, averaged over heads and layers, with their entries side by side."""

    share: Float[Tensor, "b m"]
    position: Int[Tensor, "b m"]  # -1: an empty slot

    def top(self, count: int) -> list[tuple[float, int]]:
        """Return (share, position) of the ``count`` positions with the largest shares in the first row."""
        filled = self.position[0] >= 0
        position, index = self.position[0][filled].unique(return_inverse=True)
        total = self.share.new_zeros(len(position)).scatter_add(0, index, self.share[0][filled])
        share, order = total.topk(min(count, len(position)))
        return [pair for pair in zip(share.tolist(), position[order].tolist(), strict=True) if pair[0] > 0]


def mean_trace(layers: list[AttentionTrace]) -> AttentionTrace | None:
    """Return the mean over layers, or None where no layer has recorded its attention."""
    if not layers:
        return None
    return AttentionTrace(
        torch.cat([trace.share for trace in layers], 1) / len(layers), torch.cat([trace.position for trace in layers], 1)
    )
