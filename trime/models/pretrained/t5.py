"""T5 and FLAN-T5: an encoder with relative position bias read with memories, and a decoder over what it has encoded.

transformers computes the bias from contiguous positions and, from version 5 on, ties all output layers: both are done
here by hand.
"""

from __future__ import annotations

from typing import Any

import torch

from trime.models.pretrained.family import Layer, kind_of
from trime.types import Bool, Float, Int, Tensor

SUPPORTED = ("T5ForConditionalGeneration", "T5EncoderModel")


class T5Layer:
    """Attention without scale, then a feed-forward block (gated or not)."""

    def __init__(self, block: Any):
        self.attention, self.block = block.layer[0].SelfAttention, block

    def project(self, x: Float[Tensor, "b l e"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [b l h d]."""
        normed, own = self.block.layer[0].layer_norm(x), self.attention
        query, key, value = (part(normed).unflatten(-1, (own.n_heads, -1)) for part in (own.q, own.k, own.v))
        return query, key, value

    def finish(self, x: Float[Tensor, "b l e"], attended: Float[Tensor, "b l h d"]) -> Float[Tensor, "b l e"]:
        """The layer's output."""
        return self.block.layer[-1](x + self.attention.o(attended.flatten(2)))


class T5Encoder:
    """The encoder's parts; its first layer has the position bias of all."""

    causal = False

    def __init__(self, model: Any):
        kind_of(model, SUPPORTED)
        self.model, self.stack = model, model.encoder
        self.layers: list[Layer] = [T5Layer(block) for block in self.stack.block]
        self.windows: list[int | None] = [None] * len(self.layers)
        self.first = self.stack.block[0].layer[0].SelfAttention

    def embed(self, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b l e"]:
        """Tokens as the first layer reads them."""
        return self.model.get_input_embeddings()(tokens)

    def stored(self, key: Float[Tensor, "b l h d"], position: Int[Tensor, "b l"]) -> Float[Tensor, "b l h d"]:
        """Keys as a memory keeps them: positions come in as a bias."""
        return key

    def score(self, query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
        """q k + bias of the distance, the same in every layer."""
        bucket = self.first._relative_position_bucket(
            of[:, None] - at[:, :, None],
            bidirectional=True,
            num_buckets=self.first.relative_attention_num_buckets,
            max_distance=self.first.relative_attention_max_distance,
        )
        bias = self.first.relative_attention_bias(bucket).permute(0, 3, 1, 2)
        return query.transpose(1, 2) @ key.permute(0, 2, 3, 1) + bias

    def last(self, x: Float[Tensor, "b l e"]) -> Float[Tensor, "b l e"]:
        """The last norm."""
        return self.stack.final_layer_norm(x)

    def logits(
        self, tokens: Int[Tensor, "b t"], encoded: Float[Tensor, "b m e"], filled: Bool[Tensor, "b m"]
    ) -> Float[Tensor, "b t v"]:
        """The decoder's, for given tokens, over an encoder-output memory."""
        hidden = self.decoded(tokens, encoded, filled).last_hidden_state
        if self.model.config.scale_decoder_outputs:
            hidden = hidden * self.model.config.d_model**-0.5
        return self.model.lm_head(hidden)

    def looked(
        self, tokens: Int[Tensor, "b t"], encoded: Float[Tensor, "b m e"], filled: Bool[Tensor, "b m"]
    ) -> Float[Tensor, "b m"]:
        """Attention of the last token to the encoder's outputs, the mean over heads and layers."""
        usual = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")  # others do not tell
        found = self.decoded(tokens, encoded, filled, output_attentions=True).cross_attentions
        self.model.set_attn_implementation(usual)
        return torch.stack([part[:, :, -1] for part in found]).mean((0, 2))

    def decoded(self, tokens: Tensor, encoded: Tensor, filled: Tensor, **more: bool) -> Any:
        """What the decoder's stack makes of tokens."""
        return self.model.decoder(input_ids=tokens, encoder_hidden_states=encoded, encoder_attention_mask=filled.long(), **more)
