"""Causal self-attention by PyTorch's fused kernels, and the feed-forward block."""

from __future__ import annotations

import torch
from torch import nn

from trime.kernels.cpu import attend
from trime.types import Bool, Float, Tensor


class CausalAttention(nn.Module):
    """Multi-head attention to a row's own and earlier positions (Vaswani et al. 2017).

    Padding stands after a row's tokens, so that the causal mask hides it from every token; ``padding`` hides padding from
    itself as well.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        head_width(width, heads)
        self.heads, self.dropout = heads, dropout
        self.inward = nn.Linear(width, 3 * width)  # query, key, value
        self.outward = nn.Linear(width, width)
        for part in self.inward.weight.chunk(3):
            nn.init.xavier_uniform_(part, gain=2**-0.5)
        nn.init.xavier_uniform_(self.outward.weight)
        nn.init.zeros_(self.outward.bias)

    def forward(self, x: Float[Tensor, "b l d"], padding: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b l d"]:
        """Return attended values."""
        b, length, width = x.shape
        query, key, value = self.inward(x).view(b, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mask = None if padding is None else causal_padding_mask(padding)
        attended = attend(query, key, value, mask, dropout, causal=mask is None)
        return self.outward(attended.transpose(1, 2).reshape(b, length, width))


def head_width(width: int, heads: int) -> int:
    """Return the width of a head; ValueError where the model's width is not a multiple of the number of heads."""
    if width % heads:
        raise ValueError(f"width={width} is not a multiple of heads={heads}: choose model.backbone.heads to divide it")
    return width // heads


def causal_padding_mask(padding: Bool[Tensor, "b l"]) -> Bool[Tensor, "b 1 l l"]:
    """Return the causal mask without padding; the first position is always visible, so that no row is empty."""
    length = padding.shape[1]
    hidden = padding & (torch.arange(length, device=padding.device) > 0)
    return ~hidden[:, None, None] & hidden.new_ones(length, length).tril()


def feed_forward(width: int, inner: int, dropout: float, biases: bool = True) -> nn.Sequential:
    """Return the feed-forward block: linear, ReLU, dropout, linear."""
    inward, outward = nn.Linear(width, inner, bias=biases), nn.Linear(inner, width, bias=biases)
    for layer in (inward, outward):
        nn.init.xavier_uniform_(layer.weight)
        if biases:
            nn.init.zeros_(layer.bias)
    return nn.Sequential(inward, nn.ReLU(), nn.Dropout(dropout), outward)
