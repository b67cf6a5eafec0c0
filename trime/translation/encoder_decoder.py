"""The encoder-decoder Transformer of translation (Vaswani et al. 2017; TRIME Appendix C).

g is the input of the decoder's last feed-forward block, or its output f (``key: f``, as in the published code).
Encoder and decoder are pre-norm, or post-norm as in Vaswani et al. (Xiong et al. 2020, Figure 1). A pre-norm stack ends with
a layer norm, a post-norm stack does not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from trime.common.types import Bool, Encoding, Float, Int, Tensor
from trime.errors import UserError
from trime.layers.attention import feed_forward, fused_attention, head_width, split_heads
from trime.layers.embeddings import PlainInput, sinusoids
from trime.models.backbones.transformer import FIRST_POSITION

KEYS = ("g", "f")


class CrossAttention(nn.Module):
    """Multi-head attention to keys and values from elsewhere: another sequence, or a cache."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        head_width(width, heads)
        self.heads, self.dropout = heads, dropout
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.kv_proj = nn.Linear(width, 2 * width)  # key, value
        for projection in (self.q_proj.weight, *self.kv_proj.weight.chunk(2)):
            nn.init.xavier_uniform_(projection, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def keys(self, x: Float[Tensor, "b m d"]) -> Float[Tensor, "2 b h m e"]:
        return split_heads(self.kv_proj(x), 2, self.heads)  # keys and values

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        keys: Float[Tensor, "2 b h m e"],
        mask: Bool[Tensor, "b 1 #l m"] | None = None,
        causal: bool = False,
    ) -> Float[Tensor, "b l d"]:
        (query,) = split_heads(self.q_proj(x), 1, self.heads)
        dropout = self.dropout if self.training else 0.0
        attended = fused_attention(query, keys[0], keys[1], mask, dropout, causal)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class ResidualLayer(nn.Module):
    """Sublayers with residual connections: x + f(norm(x)) with ``norm_first`` (pre-norm), else norm(x + f(x)) (post-norm)."""

    def __init__(self, norm_first: bool, dropout: float):
        super().__init__()
        self.norm_first, self.dropout = norm_first, nn.Dropout(dropout)

    def sublayer_input(self, norm: nn.Module, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        return norm(x) if self.norm_first else x

    def add(self, norm: nn.Module, x: Float[Tensor, "b l d"], output: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        x = x + self.dropout(output)
        return x if self.norm_first else norm(x)


class EncoderLayer(ResidualLayer):
    """Self-attention, then a feed-forward block."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, inner_dropout: float, norm_first: bool = True):
        super().__init__(norm_first, dropout)
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CrossAttention(width, heads, inner_dropout)
        self.ffn = feed_forward(width, inner, inner_dropout)

    def forward(self, x: Float[Tensor, "b s d"], is_token: Bool[Tensor, "b 1 1 s"]) -> Float[Tensor, "b s d"]:
        """Return the layer's output; ``is_token`` is false on padding."""
        inputs = self.sublayer_input(self.attention_norm, x)
        x = self.add(self.attention_norm, x, self.attention(inputs, self.attention.keys(inputs), is_token))
        return self.add(self.ffn_norm, x, self.ffn(self.sublayer_input(self.ffn_norm, x)))


class DecoderLayer(ResidualLayer):
    """Self-attention, attention to the source, and a feed-forward block, whose input is the layer's g."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, inner_dropout: float, norm_first: bool = True):
        super().__init__(norm_first, dropout)
        self.attention_norm, self.cross_norm, self.ffn_norm = (nn.LayerNorm(width) for _ in range(3))
        self.attention, self.cross = (CrossAttention(width, heads, inner_dropout) for _ in range(2))
        self.ffn = feed_forward(width, inner, inner_dropout)

    def forward(
        self,
        x: Float[Tensor, "n l d"],
        cache: Float[Tensor, "2 n h t e"] | None,
        source: Float[Tensor, "2 b h s e"],
        is_token: Bool[Tensor, "b 1 1 s"],
    ) -> tuple[Float[Tensor, "n l d"], Float[Tensor, "n l d"], Tensor]:
        """Return the output, g, and the keys and values of all tokens so far; ``cache`` holds those of earlier tokens."""
        inputs = self.sublayer_input(self.attention_norm, x)
        keys = self.attention.keys(inputs)
        keys = keys if cache is None else torch.cat([cache, keys], 3)
        x = self.add(self.attention_norm, x, self.attention(inputs, keys, causal=x.shape[1] > 1))
        query = self.sublayer_input(self.cross_norm, x).view(len(is_token), -1, x.shape[2])  # rows of one source are adjacent
        x = self.add(self.cross_norm, x, self.cross(query, source, is_token).view_as(x))
        g = self.sublayer_input(self.ffn_norm, x)
        return self.add(self.ffn_norm, x, self.ffn(g)), g, keys


class EncodedSource(NamedTuple):
    """An encoded source: its keys and values in each decoder layer, and which of its positions are tokens."""

    keys: tuple[Float[Tensor, "2 b h s e"], ...]
    is_token: Bool[Tensor, "b 1 1 s"]

    def take(self, rows: Tensor) -> EncodedSource:
        return EncodedSource(tuple(layer[:, rows] for layer in self.keys), self.is_token[rows])


DecoderCache = tuple[Tensor, ...]  # keys and values of the tokens so far [2 n h t e], layer by layer


class EncoderDecoder(nn.Module):
    """An encoder and a decoder of ``layers`` layers each; rows are padded with ``pad`` on the right.

    ``source_vocabulary`` is the size of a separate table for the source language; None: one table serves both languages.
    """

    is_stateful = False
    needs_source = True  # a batch must have the sentences that are translated

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
        self.register_buffer("position", sinusoids(positions, width, FIRST_POSITION), persistent=False)
        self.dropout = nn.Dropout(dropout)
        sizes = (width, heads, inner, dropout, inner_dropout)
        self.encoder = nn.ModuleList(EncoderLayer(*sizes, encoder_norm_first) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(*sizes, decoder_norm_first) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width) if encoder_norm_first else nn.Identity()
        self.final_norm = nn.LayerNorm(width) if decoder_norm_first else nn.Identity()
        self.source_embedding = (
            None if source_vocabulary is None else PlainInput(source_vocabulary, width, embedding.table.padding_idx)
        )

    def embed(self, table: PlainInput, tokens: Int[Tensor, "b l"], first: int = 0) -> Float[Tensor, "b l d"]:
        """Return embeddings with positions from ``first`` on; UserError where ``positions`` are exceeded."""
        length = first + tokens.shape[1]
        if length > self.positions:
            raise UserError(f"a sentence of {length} pieces exceeds model.backbone.positions={self.positions}: raise it")
        return self.dropout(math.sqrt(self.width) * table(tokens) + self.position[first:length])

    def encode_source(self, source: Int[Tensor, "b s"]) -> EncodedSource:
        """Encode the source, for every step of the decoder."""
        table = self.embedding if self.source_embedding is None else self.source_embedding
        x, is_token = self.embed(table, source), (source != self.pad)[:, None, None]
        for layer in self.encoder:
            x = layer(x, is_token)
        x = self.encoder_norm(x)
        return EncodedSource(tuple(layer.cross.keys(x) for layer in self.decoder), is_token)  # type: ignore[operator,union-attr]

    def step(
        self, source: EncodedSource, tokens: Int[Tensor, "n l"], cache: DecoderCache | None
    ) -> tuple[Encoding, DecoderCache]:
        """Encode the next tokens of each row: all at once, or one at a time with the ``cache`` of earlier ones."""
        # The n rows are n/b hypotheses of each of b sources, side by side: a source is encoded once.
        x = g = self.embed(self.embedding, tokens, cache[0].shape[3] if cache else 0)
        new_cache = []
        for number, layer in enumerate(self.decoder):
            x, g, keys = layer(x, cache[number] if cache else None, source.keys[number], source.is_token)
            new_cache.append(keys)
        f = self.final_norm(x)
        return Encoding(f, g if self.key == "g" else f), tuple(new_cache)

    def forward(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b l"]) -> Encoding:
        """Return f and g of the contexts (x, y_<t); ``target`` begins with the start token."""
        return self.step(self.encode_source(source), target, None)[0]
