"""T5 and FLAN-T5: an encoder with relative position bias, read with memories, and a decoder over its outputs.

transformers computes the bias from contiguous positions and, from version 5 on, ties all output layers: both are handled
here explicitly.
"""

from __future__ import annotations

from typing import Any

from trime.common.pretrained import model_class
from trime.common.types import Bool, Float, Int, Tensor

SUPPORTED = ("T5ForConditionalGeneration", "T5EncoderModel")


class T5Layer:
    """A T5 layer: attention without scale, then a feed-forward block (gated or not)."""

    def __init__(self, block: Any):
        self.attention, self.block = block.layer[0].SelfAttention, block

    def project(self, x: Float[Tensor, "b l e"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [b l h d]."""
        normed, attention = self.block.layer[0].layer_norm(x), self.attention
        projections = (attention.q, attention.k, attention.v)
        query, key, value = (project(normed).unflatten(-1, (attention.n_heads, -1)) for project in projections)
        return query, key, value

    def finish(self, x: Float[Tensor, "b l e"], attended: Float[Tensor, "b l h d"]) -> Float[Tensor, "b l e"]:
        return self.block.layer[-1](x + self.attention.o(attended.flatten(2)))


class RelativeBias:
    """Scores q k + bias of the distance, which is that of the ``first`` layer in every layer."""

    def __init__(self, first: Any):
        self.first = first

    def stored(self, key: Float[Tensor, "b l h d"], position: Int[Tensor, "b l"]) -> Float[Tensor, "b l h d"]:
        """Return keys as a memory stores them: unchanged, for positions enter as a bias."""
        return key

    def __call__(self, query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
        """Return scores [b h q m] of queries [b q h d] at positions ``at`` and keys at positions ``of``."""
        first = self.first
        bucket = first._relative_position_bucket(
            of[:, None] - at[:, :, None],
            bidirectional=True,
            num_buckets=first.relative_attention_num_buckets,
            max_distance=first.relative_attention_max_distance,
        )
        bias = first.relative_attention_bias(bucket).permute(0, 3, 1, 2)
        return query.transpose(1, 2) @ key.permute(0, 2, 3, 1) + bias


class T5Encoder:
    """The encoder, split at its layers' attention, and the decoder over its outputs."""

    causal = False

    def __init__(self, model: Any):
        model_class(model, SUPPORTED)
        self.model, self.stack, self.key_heads = model, model.encoder, model.config.num_heads
        self.layers = [T5Layer(block) for block in self.stack.block]
        self.windows: list[int | None] = [None] * len(self.layers)
        self.score = RelativeBias(self.stack.block[0].layer[0].SelfAttention)

    def embed(self, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b l e"]:
        return self.model.get_input_embeddings()(tokens)

    def final_norm(self, x: Float[Tensor, "b l e"]) -> Float[Tensor, "b l e"]:
        return self.stack.final_layer_norm(x)

    def logits(
        self, tokens: Int[Tensor, "b t"], encoded: Float[Tensor, "b m e"], filled: Bool[Tensor, "b m"]
    ) -> Float[Tensor, "b t v"]:
        """Return the decoder's logits for tokens, over a memory of encoder outputs."""
        output = self.model.decoder(input_ids=tokens, encoder_hidden_states=encoded, encoder_attention_mask=filled.long())
        hidden = output.last_hidden_state
        if self.model.config.scale_decoder_outputs:
            hidden = hidden * self.model.config.d_model**-0.5
        return self.model.lm_head(hidden)
