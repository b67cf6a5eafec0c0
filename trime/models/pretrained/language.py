"""A pretrained decoder as a language model of this package: (f, g) of every token, and its output layer's mass.

f is what the output layer reads. g is the input of the last feed-forward block, as in the other backbones, where the layers of
the model's family are known (``rope.KINDS``), and f elsewhere. Without memories a window is encoded at once by the model's own
code; with memories the layers keep a state from window to window and read chunk by chunk, as in Attendre with no query waiting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from trime.common.choices import CachedKeys, Dtype, Extension, TopKSearch
from trime.common.pretrained import cache_name, empty_cache, load_pretrained, model_class, positions_of
from trime.common.types import Bool, Encoding, Float, Int, LogMass, Tensor
from trime.errors import UserError, install_command
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory, MemoryState
from trime.kv.layer_memory import repeated
from trime.kv.reader import memories_in_model
from trime.kv.rope import KINDS, RopeDecoder, per_layer
from trime.layers.attention import AttentionTrace
from trime.layers.heads import in_blocks, project_and_pick


class PretrainedDecoder(nn.Module):
    """The pretrained model. ``lora``: ``rank``, ``alpha`` and ``dropout`` of low-rank updates, the only weights trained then.

    UserError where the tokenizer has more symbols than the output layer.
    """

    def __init__(
        self,
        vocabulary: int,
        name: str,
        position: Extension = "lm_infinite",
        factor: float = 1.0,
        cached_keys: CachedKeys = "before_rope",
        lora: dict[str, Any] | None = None,
        dtype: Dtype = "float32",
    ):
        super().__init__()
        self.model = load_pretrained(name, dtype)
        known = type(self.model).__name__ in KINDS
        self.family = RopeDecoder(self.model, position, factor, cached_keys) if known else None
        if self.model.config.is_encoder_decoder:
            model_class(self.model, KINDS)
        if self.model.get_output_embeddings() is None:
            raise UserError(f"model.name={name} has no output layer that predicts tokens: name a causal language model")
        rows = len(self.model.get_output_embeddings().weight)
        if vocabulary > rows:
            raise UserError(
                f"model.name={name}: its tokenizer has {vocabulary:,} symbols, more than the {rows:,} of its output layer"
            )
        self.updates = None if lora is None else [add_lora(self.model, **lora)]  # a list: not registered as a submodule

    def encode(self, tokens: Int[Tensor, "b l"], cache: Any = None) -> Float[Tensor, "b l d"]:
        """Return the input of the output layer, which then computes the logits of the last token only."""
        caught: list[Tensor] = []

        def catch(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            caught.append(inputs[0])
            return (inputs[0][:, -1:],)

        hook = self.model.get_output_embeddings().register_forward_pre_hook(catch)
        try:
            self.model(input_ids=tokens, **cache_arguments(cache))
        finally:
            hook.remove()
        return caught[0]

    def save(self, folder: Path) -> None:
        """Write the model in the transformers format, with low-rank updates merged into its weights."""
        model = self.updates[0].merge_and_unload() if self.updates else self.model
        model.save_pretrained(folder)


def cache_arguments(cache: Any) -> dict[str, Any]:
    return {"use_cache": False} if cache is None else {cache_name(): cache, "use_cache": True}


def add_lora(model: Any, rank: int, alpha: int, dropout: float = 0.0) -> Any:
    """Add low-rank updates (Hu et al. 2022) to every linear layer but the output's, in place, and freeze all other weights."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UserError(f"model.lora needs the package peft: {install_command('lora')}") from None
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules="all-linear"))


class PretrainedState(NamedTuple):
    """The state of all rows: each layer's memory, and the position of the next token."""

    layers: tuple[MemoryState, ...]
    position: Int[Tensor, " b"]


class PretrainedBackbone(nn.Module):
    """Encodes tokens as (f, g). ``memory``: each layer keeps ``size`` entries by ``policy``; 0: no memory.

    ``size`` and ``top_k`` may be lists, with a value for each layer; ``chunk``: tokens read at a time. ``per_head``: each
    head of keys evicts for itself.
    """

    def __init__(
        self,
        embedding: PretrainedDecoder,
        memory: dict[str, Any],
        top_k: int | list[int | None] | None = None,
        search: TopKSearch = "exact",
        chunk: int = 128,
        per_head: bool = False,
    ):
        super().__init__()
        self.decoder, self.chunk = embedding, chunk
        size, policy = memory["size"], memory["policy"]
        self.is_stateful = bool(size)
        config = embedding.model.config
        self.positions, self.width = positions_of(config), config.hidden_size
        if self.is_stateful:
            model_class(embedding.model, KINDS)
            assert embedding.family is not None
            family = embedding.family
            self.positions = 2**31
            sizes, best = (
                per_layer(value, len(family.layers), name) for value, name in ((size, "memory_size"), (top_k, "top_k"))
            )
            pairs = zip(sizes, best, family.windows, strict=True)
            memories = [Attendre(BoundedMemory(m, policy), 0, k, True, window, search) for m, k, window in pairs]
            # The memories that read last, whose entries a state holds; they are in no state dict.
            self.cache = memories_in_model(family, memories, chunk, family.key_heads if per_head else 1, False)

    def forward(
        self, tokens: Int[Tensor, "b l"], state: Any = None, fresh: Bool[Tensor, " b"] | None = None, kept: Any = None
    ) -> tuple[Encoding, Any]:
        """Encode the next window of each row; rows marked ``fresh`` start a new document.

        ``kept``: without memories, a ``new_cache``: tokens go on with what it holds, which is updated in place.
        """
        family = self.decoder.family
        if family is None:
            f = self.decoder.encode(tokens, kept)
            return Encoding(f, f), state
        ffn_inputs: list[Tensor] = []
        last = family.stack.layers[-1].mlp
        hook = last.register_forward_pre_hook(lambda _, inputs: ffn_inputs.append(inputs[0]))
        try:
            if not self.is_stateful:
                f = family.stack(input_ids=tokens, **cache_arguments(kept)).last_hidden_state
            else:
                f, state = self.read(tokens, state, fresh)
        finally:
            hook.remove()
        return Encoding(f, torch.cat(ffn_inputs, 1)), state

    @property
    def has_cache(self) -> bool:
        """True where a window can be read token by token: neither memories nor another state hold what was read."""
        return not (self.is_stateful or self.decoder.model._is_stateful)

    def new_cache(self) -> Any:
        """Return an empty cache of keys and values for a window that is read token by token."""
        return empty_cache(self.decoder.model)

    @torch.no_grad()
    def read(
        self, tokens: Int[Tensor, "b l"], state: PretrainedState | None, fresh: Bool[Tensor, " b"] | None
    ) -> tuple[Float[Tensor, "b l e"], PretrainedState]:
        """Encode the next window of each row with memories."""
        state = self.initial_state(len(tokens)) if state is None else state
        assert state is not None
        state = state if fresh is None else self.reset(state, fresh)
        family = self.decoder.family
        assert family is not None
        self.cache, outputs, position = self.cache.holding(state.layers), [], state.position
        for chunk in tokens.split(self.chunk, 1):
            positions = position[:, None] + torch.arange(chunk.shape[1], device=chunk.device)
            outputs.append(family.read(chunk, positions, self.cache))
            position = position + chunk.shape[1]
        return torch.cat(outputs, 1), PretrainedState(
            tuple(layer.state for layer in self.cache.with_separate_rankings()), position
        )

    def initial_state(self, rows: int) -> PretrainedState | None:
        if not self.is_stateful:
            return None
        family, weight = self.decoder.family, self.decoder.model.get_input_embeddings().weight
        assert family is not None
        nothing = weight.new_zeros(rows, 0, family.key_heads, family.layers[0].width)
        layers = tuple(layer.empty(nothing) for layer in self.cache.memories)
        return PretrainedState(layers, torch.zeros(rows, dtype=torch.long, device=weight.device))

    def reset(self, state: PretrainedState, rows: Bool[Tensor, " b"]) -> PretrainedState:
        pairs = zip(self.cache.memories, state.layers, strict=True)
        layers = tuple(layer.memory.keys.reset(old, repeated(rows, layer.heads)) for layer, old in pairs)
        return PretrainedState(layers, state.position.masked_fill(rows, 0))

    def training_metrics(self) -> dict[str, Tensor]:
        return {}

    def record_attention(self) -> None:
        """Make every layer keep the attention of the last query from now on."""
        for layer in self.cache.memories:
            layer.records = True

    def attention_traces(self) -> list[AttentionTrace]:
        """Return the attention of the last query, layer by layer."""
        return self.cache.traces()


class PretrainedHead(nn.Module):
    """The model's own output layer; ``mass`` is the mass of the whole vocabulary, as for a plain softmax.

    UserError where the model computes logits from it in a way that is not known here.
    """

    def __init__(self, embedding: PretrainedDecoder):
        super().__init__()
        self.output, config = embedding.model.get_output_embeddings(), embedding.model.config
        self.cap = getattr(config, "final_logit_softcapping", None)  # Gemma
        self.scale = getattr(config, "logit_scale", None) or 1 / (
            getattr(config, "logits_scaling", None) or 1
        )  # Cohere; Granite
        self.is_plain = self.cap is None and self.scale == 1 and self.output.bias is None
        with torch.no_grad():
            tokens = torch.arange(4, device=self.output.weight.device)[None] % len(self.output.weight)
            wanted = embedding.model(input_ids=tokens, use_cache=False).logits[0].float()
            if not torch.allclose(self.logits(embedding.encode(tokens)[0]), wanted, rtol=1e-2, atol=1e-2):
                raise UserError(
                    f"{type(embedding.model).__name__} changes its output layer's logits in a way that is not supported"
                )

    def logits(self, f: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Return the model's logits."""
        logits = F.linear(f, self.output.weight, self.output.bias).float() * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def mass(self, f: Float[Tensor, "n d"], target: Int[Tensor, " n"]) -> LogMass:
        """Return the target's logit and the logsumexp of all logits."""
        if self.is_plain:
            return LogMass(*in_blocks(project_and_pick, len(self.output.weight), f, target, self.output.weight))
        logits = self.logits(f)
        return LogMass(logits.gather(1, target[:, None]).squeeze(1), logits.logsumexp(1))

    def log_probs(self, f: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        return self.logits(f).log_softmax(1)
