"""A pretrained decoder as a language model of this suite: (f, g) of every token, and evidence of its output layer.

g is the input of the last feed-forward block, as everywhere. Without memories a window is read whole, by the model's
own code; with them its layers read on from window to window, chunk by chunk, as in Attendre with no query waiting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from trime.memory.bounded import BoundedMemory
from trime.models.attendre import Attendre, Waiting
from trime.models.attention_trace import AttentionTrace
from trime.models.layers.heads import by_blocks, linear_picked
from trime.models.pretrained.loading import load_pretrained
from trime.models.pretrained.lora import adapted
from trime.models.pretrained.reader import Hidden, Stack
from trime.models.pretrained.rope import RopeDecoder
from trime.types import Bool, Encoding, Float, Int, Mass, Tensor, UserError


class PretrainedDecoder(nn.Module):
    """The model itself. ``lora``: ``rank``, ``alpha`` and ``dropout`` of low-rank updates, which alone are trained then."""

    def __init__(
        self,
        vocabulary: int,
        name: str,
        position: str = "lm_infinite",
        factor: float = 1.0,
        stored: str = "before",
        lora: dict[str, Any] | None = None,
        dtype: str = "float32",
    ):
        super().__init__()
        self.model = load_pretrained(name, dtype)
        self.family = RopeDecoder(self.model, position, factor, stored)
        rows = len(self.model.get_output_embeddings().weight)
        if vocabulary > rows:
            raise UserError(
                f"model.name={name}: its tokenizer has {vocabulary:,} symbols, more than the {rows:,} that it puts out"
            )
        self.updates = None if lora is None else [adapted(self.model, **lora)]  # in a list: its weights are the model's own

    @property
    def feed(self) -> nn.Module:
        """The last layer's feed-forward block."""
        return self.family.stack.layers[-1].mlp

    def save(self, folder: Path) -> None:
        """Writes it in the transformers format; low-rank updates are added to the weights for good."""
        model = self.updates[0].merge_and_unload() if self.updates else self.model
        model.save_pretrained(folder)


class PretrainedState(NamedTuple):
    """What rows carry on: each layer's memory, and the position of the next token."""

    layers: tuple[Waiting, ...]
    position: Int[Tensor, " b"]


class PretrainedBackbone(nn.Module):
    """Tokens to (f, g); ``memory``: ``size`` entries that each layer keeps by ``policy``, 0: windows are read whole.

    ``size`` and ``top_k`` may be lists, one for each layer; ``chunk``: tokens read at a time.
    """

    def __init__(
        self,
        embedding: PretrainedDecoder,
        memory: dict[str, Any],
        top_k: int | list[int | None] | None = None,
        search: str = "exact",
        chunk: int = 128,
    ):
        super().__init__()
        self.decoder, self.chunk = embedding, chunk
        family, (size, policy) = embedding.family, (memory["size"], memory["policy"])
        self.is_stateful = bool(size)
        config = embedding.model.config
        self.positions, self.width = config.max_position_embeddings, config.hidden_size
        if self.is_stateful:
            self.positions = 2**31
            sizes, best = (each(value, len(family.layers), name) for value, name in ((size, "memory_size"), (top_k, "top_k")))
            pairs = zip(sizes, best, family.windows, strict=True)
            memories = [Attendre(BoundedMemory(m, policy), 0, k, True, window, search) for m, k, window in pairs]
            self.stack = Stack(family, memories)

    def forward(
        self, tokens: Int[Tensor, "b l"], state: PretrainedState | None = None, fresh: Bool[Tensor, " b"] | None = None
    ) -> tuple[Encoding, PretrainedState | None]:
        """Encodes the next window of each row; rows that are ``fresh`` start a document."""
        heard: list[Tensor] = []
        hook = self.decoder.feed.register_forward_pre_hook(lambda _, given: heard.append(given[0]))
        try:
            if not self.is_stateful:
                f = self.decoder.family.stack(input_ids=tokens, use_cache=False).last_hidden_state
            else:
                f, state = self.read(tokens, state, fresh)
        finally:
            hook.remove()
        return Encoding(f, torch.cat(heard, 1)), state

    @torch.no_grad()
    def read(
        self, tokens: Int[Tensor, "b l"], state: PretrainedState | None, fresh: Bool[Tensor, " b"] | None
    ) -> tuple[Float[Tensor, "b l e"], PretrainedState]:
        """The same with memories."""
        before = self.start(len(tokens)) if state is None else state
        assert before is not None
        before = before if fresh is None else self.reset(before, fresh)
        layers, position, outputs = list(before.layers), before.position, []
        for part in tokens.split(self.chunk, 1):
            places = position[:, None] + torch.arange(part.shape[1], device=part.device)
            layers, hidden = self.stack.through(layers, Hidden.of(self.decoder.family.embed(part), places))
            outputs.append(hidden.x)
            position = position + part.shape[1]
        return torch.cat(outputs, 1), PretrainedState(tuple(layers), position)

    def start(self, rows: int) -> PretrainedState | None:
        """The state of rows that have read nothing."""
        if not self.is_stateful:
            return None
        weight = self.decoder.model.get_input_embeddings().weight
        layers = self.stack.start(weight.new_zeros(rows, 0, self.width))
        return PretrainedState(tuple(layers), torch.zeros(rows, dtype=torch.long, device=weight.device))

    def reset(self, state: PretrainedState, rows: Bool[Tensor, " b"]) -> PretrainedState:
        """Forgets everything of some rows."""
        pairs = zip(self.stack.memories, state.layers, strict=True)
        layers = tuple(own._replace(keys=memory.keys.reset(own.keys, rows)) for memory, own in pairs)
        return PretrainedState(layers, state.position.masked_fill(rows, 0))

    def figures(self) -> dict[str, Tensor]:
        """Nothing to tell in training."""
        return {}

    def tell(self) -> None:
        """From now on ``looked`` is known."""
        self.stack.last = []

    def looked(self) -> list[AttentionTrace]:
        """Where the last query looked, layer by layer."""
        return self.stack.looked()


class PretrainedHead(nn.Module):
    """The model's own output layer; ``evidence`` is the whole vocabulary's mass, as for a plain softmax."""

    def __init__(self, embedding: PretrainedDecoder):
        super().__init__()
        self.output = embedding.model.get_output_embeddings()

    def evidence(self, f: Float[Tensor, "n d"], target: Int[Tensor, " n"]) -> Mass:
        """The target's logit and the logsumexp of all."""
        return Mass(*by_blocks(linear_picked, len(self.output.weight), f, target, self.output.weight))

    def log_probs(self, f: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Log-probabilities of every token, for generation."""
        return F.linear(f, self.output.weight).float().log_softmax(1)


def each(value: Any, count: int, name: str) -> list[Any]:
    """A setting for every layer: one for all, or a list."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise UserError(f"model.{name} lists {len(value)} values, the model has {count} layers")
    return value
