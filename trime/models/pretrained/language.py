"""A pretrained decoder as a language model of this package: (f, g) of every token, and its output layer's mass.

g is the input of the last feed-forward block, as in the other backbones. Without memories a window is encoded at once by the
model's own code; with memories the layers keep a state from window to window and read chunk by chunk, as in Attendre with no
queries waiting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from trime.common.choices import CachedKeys, Dtype, Extension, TopKSearch
from trime.common.types import Bool, Encoding, Float, Int, LogMass, Tensor
from trime.errors import UserError, install_command
from trime.memory.slots.bounded import BoundedMemory, MemoryState
from trime.models.layers.attention import AttentionTrace
from trime.models.layers.heads import in_blocks, project_and_pick
from trime.models.pretrained.attendre import Attendre
from trime.models.pretrained.layer_memory import repeated
from trime.models.pretrained.loading import load_pretrained
from trime.models.pretrained.reader import memories_in_model
from trime.models.pretrained.rope import RopeDecoder, per_layer


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
        self.family = RopeDecoder(self.model, position, factor, cached_keys)
        rows = len(self.model.get_output_embeddings().weight)
        if vocabulary > rows:
            raise UserError(
                f"model.name={name}: its tokenizer has {vocabulary:,} symbols, more than the {rows:,} of its output layer"
            )
        self.updates = None if lora is None else [add_lora(self.model, **lora)]  # a list: not registered as a submodule

    @property
    def ffn(self) -> nn.Module:  # of the last layer
        return self.family.stack.layers[-1].mlp

    def save(self, folder: Path) -> None:
        """Write the model in the transformers format, with low-rank updates merged into its weights."""
        model = self.updates[0].merge_and_unload() if self.updates else self.model
        model.save_pretrained(folder)


def add_lora(model: Any, rank: int, alpha: int, dropout: float = 0.0) -> Any:
    """Add low-rank updates (Hu et al. 2022) to every linear layer but the output's, in place, and freeze all other weights."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UserError(f"model.lora needs the package peft: {install_command('pretrained')}") from None
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules="all-linear"))


class PretrainedState(NamedTuple):
    """The state of all rows: each layer's memory, and the position of the next token."""

    layers: tuple[MemoryState, ...]
    position: Int[Tensor, " b"]


class PretrainedBackbone(nn.Module):
    """Encodes tokens as (f, g). ``memory``: each layer keeps ``size`` entries by ``policy``; 0: windows are encoded alone.

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
        family, (size, policy) = embedding.family, (memory["size"], memory["policy"])
        self.is_stateful = bool(size)
        config = embedding.model.config
        self.positions, self.width = config.max_position_embeddings, config.hidden_size
        if self.is_stateful:
            self.positions = 2**31
            sizes, best = (
                per_layer(value, len(family.layers), name) for value, name in ((size, "memory_size"), (top_k, "top_k"))
            )
            pairs = zip(sizes, best, family.windows, strict=True)
            memories = [Attendre(BoundedMemory(m, policy), 0, k, True, window, search) for m, k, window in pairs]
            # The memories that read last, whose entries a state holds; they are in no state dict.
            self.cache = memories_in_model(family, memories, chunk, family.key_heads if per_head else 1, False)

    def forward(
        self, tokens: Int[Tensor, "b l"], state: PretrainedState | None = None, fresh: Bool[Tensor, " b"] | None = None
    ) -> tuple[Encoding, PretrainedState | None]:
        """Encode the next window of each row; rows marked ``fresh`` start a new document."""
        ffn_inputs: list[Tensor] = []
        hook = self.decoder.ffn.register_forward_pre_hook(lambda _, inputs: ffn_inputs.append(inputs[0]))
        try:
            if not self.is_stateful:
                f = self.decoder.family.stack(input_ids=tokens, use_cache=False).last_hidden_state
            else:
                f, state = self.read(tokens, state, fresh)
        finally:
            hook.remove()
        return Encoding(f, torch.cat(ffn_inputs, 1)), state

    @torch.no_grad()
    def read(
        self, tokens: Int[Tensor, "b l"], state: PretrainedState | None, fresh: Bool[Tensor, " b"] | None
    ) -> tuple[Float[Tensor, "b l e"], PretrainedState]:
        """Encode the next window of each row with memories."""
        state = self.initial_state(len(tokens)) if state is None else state
        assert state is not None
        state = state if fresh is None else self.reset(state, fresh)
        self.cache, outputs, position = self.cache.holding(state.layers), [], state.position
        for chunk in tokens.split(self.chunk, 1):
            positions = position[:, None] + torch.arange(chunk.shape[1], device=chunk.device)
            outputs.append(self.decoder.family.read(chunk, positions, self.cache))
            position = position + chunk.shape[1]
        return torch.cat(outputs, 1), PretrainedState(tuple(layer.state for layer in self.cache.apart()), position)

    def initial_state(self, rows: int) -> PretrainedState | None:
        if not self.is_stateful:
            return None
        family, weight = self.decoder.family, self.decoder.model.get_input_embeddings().weight
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
    """The model's own output layer; ``mass`` is the mass of the whole vocabulary, as for a plain softmax."""

    def __init__(self, embedding: PretrainedDecoder):
        super().__init__()
        self.output = embedding.model.get_output_embeddings()

    def mass(self, f: Float[Tensor, "n d"], target: Int[Tensor, " n"]) -> LogMass:
        """Return the target's logit and the logsumexp of all logits."""
        return LogMass(*in_blocks(project_and_pick, len(self.output.weight), f, target, self.output.weight))

    def log_probs(self, f: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        return F.linear(f, self.output.weight).float().log_softmax(1)
