"""Causal self-attention through PyTorch's fused kernels."""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F

from trime.types import Float, Tensor


class CausalAttention(nn.Module):
    """Multi-head attention to the own and earlier positions of a row (Vaswani et al. 2017).

    Padding stands after a row's tokens, so the causal mask keeps it from every token.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} is not a multiple of heads={heads}: choose model.backbone.heads to divide it")
        self.heads, self.dropout = heads, dropout
        self.inward = nn.Linear(width, 3 * width)  # query, key, value
        self.outward = nn.Linear(width, width)
        for part in self.inward.weight.chunk(3):
            nn.init.xavier_uniform_(part, gain=2**-0.5)
        nn.init.xavier_uniform_(self.outward.weight)
        nn.init.zeros_(self.outward.bias)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """Attended values."""
        b, length, width = x.shape
        query, key, value = self.inward(x).view(b, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return self.outward(mixed.transpose(1, 2).reshape(b, length, width))


def feed_forward(width: int, inner: int, dropout: float) -> nn.Sequential:
    """Linear, ReLU, dropout, linear."""
    inward, outward = nn.Linear(width, inner), nn.Linear(inner, width)
    for layer in (inward, outward):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(inward, nn.ReLU(), nn.Dropout(dropout), outward)
