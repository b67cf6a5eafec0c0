"""Causal self-attention through PyTorch's fused kernels."""

from __future__ import annotations

import torch
from torch import nn

from trime.kernels.cpu import attend
from trime.types import Bool, Float, Tensor


class CausalAttention(nn.Module):
    """Multi-head attention to the own and earlier positions of a row (Vaswani et al. 2017).

    Padding stands after a row's tokens, so the causal mask keeps it from every token; ``padding`` hides it
    from itself too.
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
        """Attended values."""
        b, length, width = x.shape
        query, key, value = self.inward(x).view(b, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mask = None if padding is None else visible(padding)
        mixed = attend(query, key, value, mask, dropout, causal=mask is None)
        return self.outward(mixed.transpose(1, 2).reshape(b, length, width))


def head_width(width: int, heads: int) -> int:
    """Width of a head; ValueError where the heads do not divide the model's."""
    if width % heads:
        raise ValueError(f"width={width} is not a multiple of heads={heads}: choose model.backbone.heads to divide it")
    return width // heads


def visible(padding: Bool[Tensor, "b l"]) -> Bool[Tensor, "b 1 l l"]:
    """Earlier positions and the own one, unless they are padding; the first is always seen, so that no row is empty."""
    length = padding.shape[1]
    hidden = padding & (torch.arange(length, device=padding.device) > 0)
    return ~hidden[:, None, None] & hidden.new_ones(length, length).tril()


def feed_forward(width: int, inner: int, dropout: float, biases: bool = True) -> nn.Sequential:
    """Linear, ReLU, dropout, linear."""
    inward, outward = nn.Linear(width, inner, bias=biases), nn.Linear(inner, width, bias=biases)
    for layer in (inward, outward):
        nn.init.xavier_uniform_(layer.weight)
        if biases:
            nn.init.zeros_(layer.bias)
    return nn.Sequential(inward, nn.ReLU(), nn.Dropout(dropout), outward)
