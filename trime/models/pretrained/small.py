"""Small models in the transformers format, to be trained here: a Llama or a T5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trime.common.pretrained import check_version
from trime.errors import UserError


@dataclass(frozen=True)
class Small:
    """Sizes of a small model; an encoder-decoder has ``layers`` on both sides."""

    kind: Literal["decoder", "encdec"]
    width: int
    layers: int
    heads: int
    max_positions: int  # of pretraining

    def build(self, vocabulary: int, end: int, padding: int) -> Any:
        """Return the model with random weights; UserError where its sizes are invalid."""
        check_version()
        if self.width % self.heads:
            raise UserError(f"small.model: width={self.width} must be a multiple of heads={self.heads}")
        special: dict[str, Any] = {"vocab_size": vocabulary, "eos_token_id": end, "pad_token_id": padding}
        if self.kind == "decoder":  # with rotary positions
            from transformers import LlamaConfig, LlamaForCausalLM

            llama = LlamaConfig(
                hidden_size=self.width,
                intermediate_size=4 * self.width,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                max_position_embeddings=self.max_positions,
                tie_word_embeddings=True,
                initializer_range=self.width**-0.5,  # 0.02 suits wide models: narrow ones would begin with uniform attention
                bos_token_id=None,
                **special,
            )
            return LlamaForCausalLM(llama)
        from transformers import T5Config, T5ForConditionalGeneration

        t5 = T5Config(
            d_model=self.width,
            d_kv=self.width // self.heads,
            d_ff=4 * self.width,
            num_layers=self.layers,
            num_heads=self.heads,
            dropout_rate=0.0,
            **special | {"decoder_start_token_id": padding},
        )
        return T5ForConditionalGeneration(t5)
