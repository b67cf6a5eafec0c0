"""The pre-norm Transformer language model of Baevski & Auli (2019), the backbone of TRIME (Appendix D)."""

from __future__ import annotations

import math

from torch import nn

from trime.common.types import Bool, Encoding, Float, Int, Tensor
from trime.layers.attention import CausalAttention, feed_forward
from trime.layers.embeddings import AdaptiveInput, PlainInput, sinusoids

FIRST_POSITION = 2  # the position number of a row's first token, as in fairseq's checkpoints


class TransformerLayer(nn.Module):
    """A pre-norm layer: x += attention(norm(x)); x += feed_forward(norm(x)). The second norm's output is the layer's g."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, inner_dropout: float):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, inner_dropout)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn = feed_forward(width, inner, inner_dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "b l d"], padding: Bool[Tensor, "b l"] | None, kept: list[Tensor] | None = None
    ) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b l d"]]:
        """Return the layer's output, and the input of its feed-forward block; ``kept``: as ``CausalAttention`` has it."""
        x = x + self.dropout(self.attention(self.attention_norm(x), padding, kept))
        g = self.ffn_norm(x)
        return x + self.dropout(self.ffn(g)), g


class Transformer(nn.Module):
    """Sinusoidal positions, ``layers`` pre-norm layers, and a final norm unless ``final_norm=false``.

    ``inner_dropout`` applies to attention weights and ReLU outputs, ``dropout`` elsewhere.
    Tokens equal to ``pad`` have no position and are hidden from each other, as in fairseq; None: there is no padding token.
    ``key`` chooses the key vectors of memories: g, or f, the output layer's input.
    """

    is_stateful = False
    has_cache = True

    def __init__(
        self,
        embedding: AdaptiveInput | PlainInput,
        layers: int,
        heads: int,
        inner: int,
        positions: int,
        dropout: float = 0.0,
        inner_dropout: float = 0.0,
        final_norm: bool = True,
        pad: int | None = None,
        key: str = "g",
    ):
        super().__init__()
        if key not in ("f", "g"):
            raise ValueError(f"key={key}: memories are keyed by f or g: set model.backbone.key to one of them")
        self.key = key
        self.position: Tensor
        width = embedding.width
        self.embedding, self.positions, self.width, self.pad = embedding, positions, width, pad
        self.register_buffer("position", sinusoids(positions, width, FIRST_POSITION), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(TransformerLayer(width, heads, inner, dropout, inner_dropout) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width) if final_norm else nn.Identity()

    def new_cache(self) -> list[list[Tensor]]:
        """Return for each layer the keys and values of no positions yet."""
        return [[] for _ in self.layers]

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        state: None = None,
        fresh: Bool[Tensor, " b"] | None = None,
        kept: list[list[Tensor]] | None = None,
    ) -> tuple[Encoding, None]:
        """Encode each row by itself, or after the positions of ``kept``, a ``new_cache`` that is updated in place.

        ValueError where a row is longer than ``positions``.
        """
        first = kept[0][0].shape[2] if kept and kept[0] else 0
        length = first + tokens.shape[1]
        if length > self.positions:
            raise ValueError(f"a row of {length} tokens exceeds model.backbone.positions={self.positions}")
        position, padding = self.position[first:length], None
        if self.pad is not None and (tokens == self.pad).any():
            padding = tokens == self.pad
            position = position.masked_fill(padding[:, :, None], 0)
        x = g = self.dropout(math.sqrt(self.width) * self.embedding(tokens) + position)
        for number, layer in enumerate(self.layers):
            x, g = layer(x, padding, kept[number] if kept else None)
        f = self.final_norm(x)
        return Encoding(f, f if self.key == "f" else g), None
