"""Decoders with rotary positions: Llama, Mistral, Qwen2, GPT-NeoX."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from trime.common.choices import CACHED_KEYS, EXTENSIONS
from trime.common.pretrained import cache_name, model_class
from trime.common.types import Float, Int, Tensor
from trime.errors import UserError
from trime.layers.rotary import Rotary, RotaryScore, interpolate_positions, ntk_aware, yarn


class LlamaLayer:
    """A layer of Llama, Mistral or Qwen2: attention, then a feed-forward block, each with its norm; heads may share keys."""

    def __init__(self, layer: Any):
        self.layer, self.width = layer, layer.self_attn.head_dim

    def project(self, x: Float[Tensor, "b l e"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [b l h d], keys and values [b l g d], without positions."""
        attention, normed = self.layer.self_attn, self.layer.input_layernorm(x)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (project(normed).unflatten(-1, (-1, self.width)) for project in projections)
        return query, key, value

    def finish(self, x: Float[Tensor, "b l e"], attended: Float[Tensor, "b l h d"]) -> Float[Tensor, "b l e"]:
        x = x + self.layer.self_attn.o_proj(attended.flatten(2))
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x))


class NeoXLayer:
    """A layer of GPT-NeoX: each head's query, key and value are adjacent; both blocks may read the same input."""

    def __init__(self, layer: Any):
        self.layer, self.width = layer, layer.attention.head_size

    def project(self, x: Float[Tensor, "b l e"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [b l h d], without positions."""
        joined = self.layer.attention.query_key_value(self.layer.input_layernorm(x))
        query, key, value = joined.unflatten(-1, (-1, 3 * self.width)).chunk(3, -1)
        return query, key, value

    def finish(self, x: Float[Tensor, "b l e"], attended: Float[Tensor, "b l h d"]) -> Float[Tensor, "b l e"]:
        residual = x + self.layer.attention.dense(attended.flatten(2))
        mlp_input = x if self.layer.use_parallel_residual else residual
        return residual + self.layer.mlp(self.layer.post_attention_layernorm(mlp_input))


CHANGING = ("dynamic", "longrope")  # rotations that change with the input's length
KINDS: dict[str, type[LlamaLayer] | type[NeoXLayer]] = {  # of models, with the class of their layers
    "LlamaForCausalLM": LlamaLayer,
    "MistralForCausalLM": LlamaLayer,
    "Qwen2ForCausalLM": LlamaLayer,
    "GPTNeoXForCausalLM": NeoXLayer,
}


class RopeDecoder:
    """A decoder whose memories place queries and keys.

    ``position``: lm_infinite caps distances at the length of pretraining; interpolation, ntk and yarn stretch the rotation for
    inputs ``factor`` times as long; none leaves it as it is. Keys are cached before rotation or after it.
    """

    causal = True

    def __init__(self, model: Any, position: str = "lm_infinite", factor: float = 1.0, cached_keys: str = "before_rope"):
        layer_class = KINDS[model_class(model, KINDS)]
        if position not in EXTENSIONS or factor < 1 or cached_keys not in CACHED_KEYS:
            raise UserError(
                f"position={position}, factor={factor}, cached_keys={cached_keys}: choose from {', '.join(EXTENSIONS)}, "
                f"a factor of at least 1, and from {', '.join(CACHED_KEYS)}"
            )
        self.model, self.stack, config = model, model.base_model, model.config
        self.layers = [layer_class(layer) for layer in self.stack.layers]
        self.windows = sliding_windows(config, len(self.layers))
        self.key_heads = key_heads(config)
        module, longest = self.stack.rotary_emb, config.max_position_embeddings
        if module.rope_type in CHANGING:
            raise UserError(
                f"rope_type={module.rope_type} changes with the input's length: its keys cannot be kept in a memory"
            )
        rotary = Rotary(module.inv_freq, scale=module.attention_scaling)
        stretched = {"interpolation": interpolate_positions, "ntk": ntk_aware, "yarn": partial(yarn, longest=longest)}
        rotary = stretched[position](rotary, factor) if position in stretched else rotary  # type: ignore[operator]
        capped = longest if position == "lm_infinite" else None
        self.score = RotaryScore(rotary, capped, stored_rotated=cached_keys == "after_rope")
        # The model's own rotation at position 0 (see ``read``) has scaled queries and keys already (YaRN).
        once = replace(rotary, scale=rotary.scale / module.attention_scaling)
        self.score_at_0 = replace(self.score, rotary=once)

    def read(self, tokens: Int[Tensor, "b l"], position: Int[Tensor, "b l"], cache: Any) -> Float[Tensor, "b l e"]:
        """Return the stack's output of tokens at these positions (-1: padding), which the model reads with an EvictingCache."""
        output: Tensor = self.stack(input_ids=tokens, memory_position=position, **{cache_name(): cache}).last_hidden_state
        return output

    def embed(self, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b l e"]:
        return self.model.get_input_embeddings()(tokens)

    def final_norm(self, x: Float[Tensor, "b l e"]) -> Float[Tensor, "b l e"]:
        norm = self.stack.norm if hasattr(self.stack, "norm") else self.stack.final_layer_norm
        return norm(x)

    def logits(self, hidden: Float[Tensor, "b l e"]) -> Float[Tensor, "b l v"]:
        return self.model.get_output_embeddings()(hidden)


def key_heads(config: Any) -> int:
    """Return the number of heads of keys, which several heads of queries may share."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def sliding_windows(config: Any, layers: int) -> list[int | None]:
    """Return the sliding window of each layer that has one (Mistral; Qwen2 where its configuration says so)."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def per_layer(value: Any, count: int, name: str) -> list[Any]:
    """Return a setting for every layer, from one value for all or a list; UserError where the list has another length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise UserError(f"model.{name} lists {len(value)} values, but the model has {count} layers")
    return value
