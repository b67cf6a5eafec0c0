"""The encoder-decoder Transformer of translation (Vaswani et al. 2017; TRIME Appendix C).

g is the input of the decoder's last feed-forward block, or its output f (``key: f``, as the published code has it).
Encoder and decoder are pre-norm, or post-norm as Vaswani et al. have them (Xiong et al. 2020, Figure 1). A pre-norm stack
ends with a layer norm, a post-norm stack does not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from trime.kernels.cpu import attend
from trime.models.backbones.transformer import FIRST
from trime.models.layers.attention import feed_forward, head_width
from trime.models.layers.embeddings import PlainInput, sinusoids
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


class ResidualLayer(nn.Module):
    """Sublayers with residual connections: x + f(norm(x)) with ``norm_first`` (pre-norm), else norm(x + f(x)) (post-norm)."""

    def __init__(self, norm_first: bool, dropout: float):
        super().__init__()
        self.norm_first, self.dropout = norm_first, nn.Dropout(dropout)

    def sublayer_input(self, norm: nn.Module, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """Return what a sublayer reads of the residual stream x."""
        return norm(x) if self.norm_first else x

    def add(self, norm: nn.Module, x: Float[Tensor, "b l d"], output: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """Return the residual stream after a sublayer."""
        x = x + self.dropout(output)
        return x if self.norm_first else norm(x)


class EncoderLayer(ResidualLayer):
    """Self-attention, then a feed-forward block."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, inner_dropout: float, norm_first: bool = True):
        super().__init__(norm_first, dropout)
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, inner_dropout)
        self.feed = feed_forward(width, inner, inner_dropout)

    def forward(self, x: Float[Tensor, "b s d"], seen: Bool[Tensor, "b 1 1 s"]) -> Float[Tensor, "b s d"]:
        """Return the layer's output; ``seen`` is false on padding."""
        read = self.sublayer_input(self.attention_norm, x)
        x = self.add(self.attention_norm, x, self.attention(read, self.attention.keys(read), seen))
        return self.add(self.feed_norm, x, self.feed(self.sublayer_input(self.feed_norm, x)))


class DecoderLayer(ResidualLayer):
    """The same with attention to the source between; what the feed-forward block reads is the layer's g."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, inner_dropout: float, norm_first: bool = True):
        super().__init__(norm_first, dropout)
        self.attention_norm, self.cross_norm, self.feed_norm = (nn.LayerNorm(width) for _ in range(3))
        self.attention, self.cross = (Attention(width, heads, inner_dropout) for _ in range(2))
        self.feed = feed_forward(width, inner, inner_dropout)

    def forward(
        self,
        x: Float[Tensor, "n l d"],
        before: Float[Tensor, "2 n h t e"] | None,
        source: Float[Tensor, "2 b h s e"],
        seen: Bool[Tensor, "b 1 1 s"],
    ) -> tuple[Float[Tensor, "n l d"], Float[Tensor, "n l d"], Tensor]:
        """The layer's output, g, and the keys and values so far; ``before``: of earlier tokens. n/b rows share a source."""
        read = self.sublayer_input(self.attention_norm, x)
        keys = self.attention.keys(read)
        keys = keys if before is None else torch.cat([before, keys], 3)
        x = self.add(self.attention_norm, x, self.attention(read, keys, causal=x.shape[1] > 1))
        query = self.sublayer_input(self.cross_norm, x).view(len(seen), -1, x.shape[2])  # rows of a source follow one another
        x = self.add(self.cross_norm, x, self.cross(query, source, seen).view_as(x))
        g = self.sublayer_input(self.feed_norm, x)
        return self.add(self.feed_norm, x, self.feed(g)), g, keys


class Read(NamedTuple):
    """A source that was read: each decoder layer's keys and values of it, and which of its places are tokens."""

    keys: tuple[Float[Tensor, "2 b h s e"], ...]
    seen: Bool[Tensor, "b 1 1 s"]

    def take(self, rows: Tensor) -> Read:
        """Some of its rows."""
        return Read(tuple(own[:, rows] for own in self.keys), self.seen[rows])


Before = tuple[Tensor, ...]  # each decoder layer's keys and values of the tokens so far [2 n h t e]


class EncoderDecoder(nn.Module):
    """``layers`` in the encoder and in the decoder; ``pad`` fills rows up on the right.

    ``source_vocabulary`` is the size of the source language's own table, null where one table serves both languages.
    """

    is_stateful = False

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
        source_vocabulary: int | None = None,
        encoder_norm_first: bool = True,
        decoder_norm_first: bool = True,
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
        self.encoder = nn.ModuleList(EncoderLayer(*sizes, encoder_norm_first) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(*sizes, decoder_norm_first) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width) if encoder_norm_first else nn.Identity()
        self.final_norm = nn.LayerNorm(width) if decoder_norm_first else nn.Identity()
        self.source_embedding = (
            None if source_vocabulary is None else PlainInput(source_vocabulary, width, embedding.table.padding_idx)
        )

    def start(self, rows: int) -> None:
        """There is no state."""

    def figures(self) -> dict[str, Tensor]:
        """Nothing to tell in training."""
        return {}

    def embed(self, table: PlainInput, tokens: Int[Tensor, "b l"], first: int = 0) -> Float[Tensor, "b l d"]:
        """Tokens of a table at positions ``first`` and on; UserError where there are none left."""
        length = first + tokens.shape[1]
        if length > self.positions:
            raise UserError(f"a sentence of {length} pieces exceeds model.backbone.positions={self.positions}: raise them")
        return self.dropout(math.sqrt(self.width) * table(tokens) + self.position[first:length])

    def read(self, source: Int[Tensor, "b s"]) -> Read:
        """The source, for every step of the decoder."""
        table = self.embedding if self.source_embedding is None else self.source_embedding
        x, seen = self.embed(table, source), (source != self.pad)[:, None, None]
        for layer in self.encoder:
            x = layer(x, seen)
        x = self.encoder_norm(x)
        return Read(tuple(layer.cross.keys(x) for layer in self.decoder), seen)  # type: ignore[operator,union-attr]

    def step(self, read: Read, tokens: Int[Tensor, "n l"], before: Before | None) -> tuple[Encoding, Before]:
        """Encodes the next tokens of each row; at once all of them, or one by one with what came ``before``.

        As many rows as the beam has, one after the other, go on from each source.
        """
        x = g = self.embed(self.embedding, tokens, before[0].shape[3] if before else 0)
        after = []
        for number, layer in enumerate(self.decoder):
            x, g, keys = layer(x, before[number] if before else None, read.keys[number], read.seen)
            after.append(keys)
        f = self.final_norm(x)
        return Encoding(f, g if self.key == "g" else f), tuple(after)

    def forward(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b l"]) -> Encoding:
        """f and g of the contexts (x, y_<t); ``target`` begins with what stands before the first token."""
        return self.step(self.read(source), target, None)[0]
