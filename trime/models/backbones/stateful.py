"""A backbone with a state: each layer remembers something from segment to segment, until the document ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from trime.common.types import AttentionBlock, Bool, Encoding, Float, Int, Tensor
from trime.kv.bounded import BoundedMemory, MemoryState, take_slots
from trime.layers.attention import AttentionTrace, feed_forward
from trime.layers.embeddings import AdaptiveInput, PlainInput

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@runtime_checkable
class Stateful(Protocol):
    """A layer with a state, or its attention: nested tuples of tensors, rows first."""

    attention_traces: list[AttentionTrace] | None  # the last query's attention to the state; None: not recorded

    def initial_state(self, rows: int) -> Any:
        """Return the state of rows that have read nothing."""

    def reset(self, state: Any, rows: Bool[Tensor, " b"]) -> Any:
        """Return the state with the chosen rows cleared."""

    def training_metrics(self) -> dict[str, Tensor]:
        """Return values to log in training, such as those of gates."""


class StatefulTransformerLayer(nn.Module):
    """A pre-norm layer, as ``TransformerLayer``, whose attention has a state. The second norm's output is the layer's g."""

    def __init__(
        self,
        attention: Stateful,
        width: int,
        inner: int,
        dropout: float = 0.0,
        inner_dropout: float = 0.0,
        norm: str = "layer",
        biases: bool = True,
    ):
        super().__init__()
        self.attention_norm, self.ffn_norm = (NORMS[norm](width, eps=1e-6) for _ in range(2))
        self.attention: Any = attention
        self.ffn = feed_forward(width, inner, inner_dropout, biases)
        self.dropout, self.width = nn.Dropout(dropout), width

    def forward(
        self, x: Float[Tensor, "b l d"], state: Any, position: Int[Tensor, "b l"], kept: list[Any] | None = None
    ) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b l d"], Any]:
        """Return the layer's output, its g, and the new state; ``kept``: as the backbone has it, for this layer."""
        attended, state = self.attention(self.attention_norm(x), state, position, kept)
        x = x + self.dropout(attended)
        g = self.ffn_norm(x)
        return x + self.dropout(self.ffn(g)), g, state


class SegmentCache:
    """What each layer keeps of the ``tokens`` of a segment that were read, so that the next ones go on from there."""

    def __init__(self, layers: int):
        self.layers: list[list[Any]] = [[] for _ in range(layers)]
        self.tokens = 0


def joined(kept: list[Tensor] | None, new: Tensor) -> Tensor:
    """Return what a layer keeps of a segment with what is new [b l d], and keep it; without ``kept`` what is new alone."""
    if kept is None:
        return new
    kept[:] = [torch.cat([*kept, new], 1)]
    return kept[0]


class State(NamedTuple):
    """The state of all rows: that of each layer, and the position of the next token."""

    layers: tuple[Any, ...]
    position: Int[Tensor, " b"]


class StatefulBackbone(nn.Module):
    """An embedding without positions, layers with a state, and a final norm; segments have at most ``positions`` tokens.

    Embeddings are multiplied by ``scale``; None: by the square root of their width.
    """

    is_stateful = True
    has_cache = True

    def __init__(
        self,
        embedding: AdaptiveInput | PlainInput,
        layers: Sequence[nn.Module],
        positions: int,
        dropout: float,
        final_norm: nn.Module,
        scale: float | None = None,
    ):
        super().__init__()
        self.embedding, self.positions, self.width = embedding, positions, int(layers[-1].width)  # type: ignore[arg-type]
        self.scale = math.sqrt(embedding.width) if scale is None else scale
        self.dropout, self.final_norm = nn.Dropout(dropout), final_norm
        self.layers = nn.ModuleList(layers)

    @property
    def attentions(self) -> list[Stateful]:
        """The module of each layer that has a state: its attention, or all of an SRU++ layer."""
        layers: list[Any] = list(self.layers)
        return [getattr(layer, "attention", layer) for layer in layers]

    def initial_state(self, rows: int) -> State:
        device = next(self.parameters()).device
        layers = tuple(attention.initial_state(rows) for attention in self.attentions)
        return State(layers, torch.zeros(rows, dtype=torch.long, device=device))

    def reset(self, state: State, rows: Bool[Tensor, " b"]) -> State:
        if not rows.any():
            return state
        pairs = zip(self.attentions, state.layers, strict=True)
        layers = tuple(attention.reset(layer_state, rows) for attention, layer_state in pairs)
        return State(layers, state.position.masked_fill(rows, 0))

    def new_cache(self) -> SegmentCache:
        """Return the cache of a segment of which nothing was read."""
        return SegmentCache(len(self.layers))

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        state: State | None,
        fresh: Bool[Tensor, " b"] | None = None,
        kept: SegmentCache | None = None,
    ) -> tuple[Encoding, State]:
        """Encode the next segment of each row; rows marked ``fresh`` start a new document.

        ``kept``: a ``new_cache`` for a segment that comes piece by piece, each with the state before the segment; it is updated
        in place. The state after a segment comes from all of it at once, and what is returned for a piece is not that.
        """
        length, read = tokens.shape[1], kept.tokens if kept else 0
        if read + length > self.positions:
            raise ValueError(f"a row of {read + length} tokens exceeds model.backbone.positions={self.positions}")
        state = self.initial_state(len(tokens)) if state is None else state
        state = state if fresh is None else self.reset(state, fresh)
        position = state.position[:, None] + read + torch.arange(length, device=tokens.device)
        x = g = self.dropout(self.scale * self.embedding(tokens))
        new_states = []
        for number, (layer, layer_state) in enumerate(zip(self.layers, state.layers, strict=True)):
            x, g, new_state = layer(x, layer_state, position, kept.layers[number] if kept else None)
            new_states.append(new_state)
        if kept:
            kept.tokens += length
        return Encoding(self.final_norm(x), g), State(tuple(new_states), state.position + length)

    def record_attention(self) -> None:
        """Make every layer keep the attention of the last query from now on."""
        for attention in self.attentions:
            attention.attention_traces = []

    def attention_traces(self) -> list[AttentionTrace]:
        """Return the attention of the last query, layer by layer."""
        return [trace for attention in self.attentions for trace in attention.attention_traces or []]

    def training_metrics(self) -> dict[str, Tensor]:
        """Return the values that layers log, as ``layer0/NAME`` and so on."""
        metrics = ((number, attention.training_metrics()) for number, attention in enumerate(self.attentions))
        return {f"layer{number}/{name}": value for number, values in metrics for name, value in values.items()}


def refuse_padding(pad: int | None) -> None:
    """Raise ValueError where the published code's padding quirk is set for a backbone without it."""
    if pad is not None:
        raise ValueError("compatibility.padding is a quirk of the Transformer alone: set compatibility=none")


def unsharded_zeros(weight: Tensor, *shape: int) -> Tensor:
    """Return zeros with a weight's device and type; ``weight.new_zeros`` would be sharded where the weight is (FSDP)."""
    return torch.zeros(*shape, dtype=weight.dtype, device=weight.device)


class CacheAndSegment(NamedTuple):
    """The states that a segment attends to: the cache by position, empty slots first, and then the segment itself."""

    states: Float[Tensor, "b k d"]
    position: Int[Tensor, "b k"]
    slot: Int[Tensor, "b m"]  # the cache's slots in this order

    def visible(self, position: Int[Tensor, "b l"]) -> Bool[Tensor, "b 1 l k"]:
        """Return the causal mask: no later states, and no empty slots."""
        return ((self.position[:, None] <= position[:, :, None]) & (self.position >= 0)[:, None])[:, None]

    def attention_trace(self, weight: Float[Tensor, "b h l k"]) -> AttentionTrace:
        """Return the last query's attention to the cache."""
        size = self.slot.shape[1]
        return AttentionTrace(weight[:, :, -1, :size].mean(1), self.position[:, :size])


def concat_cache(state: MemoryState, x: Float[Tensor, "b n d"], position: Int[Tensor, "b l"]) -> CacheAndSegment:
    """Return the cache followed by the segment, of which ``position`` has the last ones."""
    slot, before = state.ranking.position.argsort(1), x.shape[1] - position.shape[1]
    position = position[:, :1] + torch.arange(-before, position.shape[1], device=x.device)
    states = torch.cat([take_slots(state.columns[0], slot), x], 1)
    return CacheAndSegment(states, torch.cat([state.ranking.position.gather(1, slot), position], 1), slot)


def update_cache(
    cache: BoundedMemory,
    state: MemoryState,
    x: Float[Tensor, "b l d"],
    position: Int[Tensor, "b l"],
    logits: Tensor | None,
    slot: Tensor,
) -> MemoryState:
    """Return the cache with the segment, detached; a policy that goes by attention learns from ``logits`` [b h l k]."""
    policy, size = cache.policy, slot.shape[1]
    if policy.uses_attention and logits is not None:
        # Logits are in order of position, the policy's entries in order of slots.
        score = torch.full_like(logits[..., :size], -torch.inf)
        score = score.scatter(-1, slot[:, None, None].expand_as(score), logits[..., :size].detach())
        summary = policy.observe(policy.begin(state.ranking), AttentionBlock(score, position))
        state = state._replace(ranking=policy.finalize(state.ranking, summary))
    return cache.update(state, (x.detach(),), position)
