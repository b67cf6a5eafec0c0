"""The encoder-decoder Transformer of translation (Vaswani et al. 2017; TRIME Appendix C), pre-norm as elsewhere here.

g is the input of the decoder's last feed-forward block, or its output f (``key: f``, as the published code has it).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from trime.cpu import attend
from trime.models.attention import feed_forward, head_width
from trime.models.embeddings import PlainInput, sinusoids
from trime.models.transformer import FIRST
from trime.types import Bool, Encoding, Float, Int, Tensor, UserError

KEYS = ("g", "f")


class Attention(nn.Module):
    """Multi-head attention of queries to given keys and values."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        head_width(width, heads)
        self.heads, self.dropout = heads, dropout
        self.query, self.outward = nn.Linear(width, width), nn.Linear(width, width)
        self.keyed = nn.Linear(width, 2 * width)  # key, value
        for part in (self.query.weight, *self.keyed.weight.chunk(2)):
            nn.init.xavier_uniform_(part, gain=2**-0.5)
        nn.init.xavier_uniform_(self.outward.weight)
        nn.init.zeros_(self.outward.bias)

    def keys(self, x: Float[Tensor, "b m d"]) -> Float[Tensor, "2 b h m e"]:
        """Keys and values."""
        return self.keyed(x).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        keys: Float[Tensor, "2 b h m e"],
        seen: Bool[Tensor, "b 1 #l m"] | None = None,
        causal: bool = False,
    ) -> Float[Tensor, "b l d"]:
        """Attended values."""
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(query, keys[0], keys[1], seen, dropout, causal)
        return self.outward(mixed.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """x += attention(norm(x)); x += feed_forward(norm(x))."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, inner_dropout: float):
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, inner_dropout)
        self.feed, self.dropout = feed_forward(width, inner, inner_dropout), nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "b s d"], seen: Bool[Tensor, "b 1 1 s"]) -> Float[Tensor, "b s d"]:
        """The layer's output."""
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, self.attention.keys(normed), seen))
        return x + self.dropout(self.feed(self.feed_norm(x)))


class DecoderLayer(nn.Module):
    """The same with attention to the source between; the last norm's output is the layer's g."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, inner_dropout: float):
        super().__init__()
        self.attention_norm, self.cross_norm, self.feed_norm = (nn.LayerNorm(width) for _ in range(3))
        self.attention, self.cross = (Attention(width, heads, inner_dropout) for _ in range(2))
        self.feed, self.dropout = feed_forward(width, inner, inner_dropout), nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "n l d"],
        before: Float[Tensor, "2 n h t e"] | None,
        source: Float[Tensor, "2 b h s e"],
        seen: Bool[Tensor, "b 1 1 s"],
    ) -> tuple[Float[Tensor, "n l d"], Float[Tensor, "n l d"], Tensor]:
        """The layer's output, g, and the keys and values so far; ``before``: of earlier tokens. n/b rows share a source."""
        normed = self.attention_norm(x)
        keys = self.attention.keys(normed)
        keys = keys if before is None else torch.cat([before, keys], 3)
        x = x + self.dropout(self.attention(normed, keys, causal=x.shape[1] > 1))
        asked = self.cross_norm(x).view(len(seen), -1, x.shape[2])  # rows of the same source, one after the other
        x = x + self.dropout(self.cross(asked, source, seen).view_as(x))
        g = self.feed_norm(x)
        return x + self.dropout(self.feed(g)), g, keys


class Read(NamedTuple):
    """A source that was read: each decoder layer's keys and values of it, and which of its places are tokens."""

    keys: tuple[Float[Tensor, "2 b h s e"], ...]
    seen: Bool[Tensor, "b 1 1 s"]

    def take(self, rows: Tensor) -> Read:
        """Some of its rows."""
        return Read(tuple(own[:, rows] for own in self.keys), self.seen[rows])


Before = tuple[Tensor, ...]  # each decoder layer's keys and values of the tokens so far [2 n h t e]


class EncoderDecoder(nn.Module):
    """``layers`` in the encoder and in the decoder, one table for both languages; ``pad`` fills rows up on the right."""

    carries = False

    def __init__(
        self,
        embedding: PlainInput,
        layers: int,
        heads: int,
        inner: int,
        positions: int,
        dropout: float = 0.0,
        inner_dropout: float = 0.0,
        key: str = "g",
        pad: int = 0,
    ):
        super().__init__()
        if key not in KEYS:
            raise UserError(f"model.backbone.key={key}: choose g (the last feed-forward input) or f (the output)")
        self.position: Tensor
        width = embedding.width
        self.embedding, self.positions, self.width, self.key, self.pad = embedding, positions, width, key, pad
        self.register_buffer("position", sinusoids(positions, width, FIRST), persistent=False)
        self.dropout = nn.Dropout(dropout)
        sizes = (width, heads, inner, dropout, inner_dropout)
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(*sizes) for _ in range(layers))
        self.encoder_norm, self.final_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def start(self, rows: int) -> None:
        """There is no state."""

    def figures(self) -> dict[str, Tensor]:
        """Nothing to tell in training."""
        return {}

    def embed(self, tokens: Int[Tensor, "b l"], first: int = 0) -> Float[Tensor, "b l d"]:
        """Tokens at positions ``first`` and on; UserError where there are none left."""
        length = first + tokens.shape[1]
        if length > self.positions:
            raise UserError(f"a sentence of {length} pieces exceeds model.backbone.positions={self.positions}: raise them")
        return self.dropout(math.sqrt(self.width) * self.embedding(tokens) + self.position[first:length])

    def read(self, source: Int[Tensor, "b s"]) -> Read:
        """The source, for every step of the decoder."""
        x, seen = self.embed(source), (source != self.pad)[:, None, None]
        for layer in self.encoder:
            x = layer(x, seen)
        x = self.encoder_norm(x)
        return Read(tuple(layer.cross.keys(x) for layer in self.decoder), seen)  # type: ignore[operator,union-attr]

    def step(self, read: Read, tokens: Int[Tensor, "n l"], before: Before | None) -> tuple[Encoding, Before]:
        """Encodes the next tokens of each row; at once all of them, or one by one with what came ``before``.

        As many rows as the beam has, one after the other, go on from each source.
        """
        x = g = self.embed(tokens, before[0].shape[3] if before else 0)
        after = []
        for number, layer in enumerate(self.decoder):
            x, g, keys = layer(x, before[number] if before else None, read.keys[number], read.seen)
            after.append(keys)
        f = self.final_norm(x)
        return Encoding(f, g if self.key == "g" else f), tuple(after)

    def forward(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b l"]) -> Encoding:
        """f and g of the contexts (x, y_<t); ``target`` begins with what stands before the first token."""
        return self.step(self.read(source), target, None)[0]
