"""A backbone whose rows read on: layers that each carry something from segment to segment, and forget it with the document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from trime.models.attention_trace import AttentionTrace
from trime.models.layers.attention import feed_forward
from trime.models.layers.embeddings import AdaptiveInput, PlainInput
from trime.types import Bool, Encoding, Float, Int, Tensor

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@runtime_checkable
class Stateful(Protocol):
    """What a layer carries on, tuples of tensors, rows first."""

    looked: list[AttentionTrace] | None  # where the last query looked among what was carried on; None: that is not kept

    def start(self, rows: int) -> Any:
        """What rows carry that have read nothing."""

    def reset(self, carried: Any, rows: Bool[Tensor, " b"]) -> Any:
        """The same without what some rows carry."""

    def figures(self) -> dict[str, Tensor]:
        """What it tells of itself in training."""


@runtime_checkable
class StatefulAttention(Stateful, Protocol):
    """Attention within a segment and to what was carried on."""

    def __call__(self, x: Float[Tensor, "b l d"], carried: Any, position: Int[Tensor, "b l"]) -> tuple[Tensor, Any]:
        """Attended values [b l d], and what is carried on."""


@runtime_checkable
class StatefulLayer(Protocol):
    """A layer that reads on."""

    width: int  # of its g

    @property
    def carrier(self) -> Stateful: ...

    def __call__(self, x: Float[Tensor, "b l d"], carried: Any, position: Int[Tensor, "b l"]) -> tuple[Tensor, Tensor, Any]:
        """The layer's output [b l d], its g [b l e], and what is carried on."""


class Sizes(NamedTuple):
    """Of a layer."""

    width: int
    inner: int
    dropout: float = 0.0
    inner_dropout: float = 0.0  # of attention weights and of the feed-forward block's ReLU


class Layer(nn.Module):
    """x += attention(norm(x)); x += feed_forward(norm(x)). The second norm's output is the layer's g."""

    def __init__(self, attention: StatefulAttention, sizes: Sizes, norm: str = "layer", biases: bool = True):
        super().__init__()
        self.attention_norm, self.feed_norm = (NORMS[norm](sizes.width, eps=1e-6) for _ in range(2))
        self.attention = attention
        self.feed = feed_forward(sizes.width, sizes.inner, sizes.inner_dropout, biases)
        self.dropout, self.width = nn.Dropout(sizes.dropout), sizes.width

    @property
    def carrier(self) -> StatefulAttention:
        return self.attention

    def forward(
        self, x: Float[Tensor, "b l d"], carried: Any, position: Int[Tensor, "b l"]
    ) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b l d"], Any]:
        """The layer's output, the input of its feed-forward block, and what is carried on."""
        mixed, carried = self.attention(self.attention_norm(x), carried, position)
        x = x + self.dropout(mixed)
        g = self.feed_norm(x)
        return x + self.dropout(self.feed(g)), g, carried


class State(NamedTuple):
    """What rows carry from segment to segment: something for each layer, and the position of the next token."""

    layers: tuple[Any, ...]
    position: Int[Tensor, " b"]


class StatefulBackbone(nn.Module):
    """An embedding without positions, layers, and a last norm; a segment holds at most ``positions`` tokens.

    Embeddings are multiplied by ``scale``; null: by the square root of their width.
    """

    is_stateful = True

    def __init__(
        self,
        embedding: AdaptiveInput | PlainInput,
        layers: Sequence[StatefulLayer],
        positions: int,
        dropout: float,
        final_norm: nn.Module,
        scale: float | None = None,
    ):
        super().__init__()
        self.embedding, self.positions, self.width = embedding, positions, layers[-1].width
        self.scale = math.sqrt(embedding.width) if scale is None else scale
        self.dropout, self.final_norm = nn.Dropout(dropout), final_norm
        self.layers = nn.ModuleList(layers)  # type: ignore[arg-type]

    @property
    def attentions(self) -> list[Stateful]:
        return [layer.carrier for layer in self.layers]  # type: ignore[misc]

    def start(self, rows: int) -> State:
        """The state of rows that have read nothing."""
        device = next(self.parameters()).device
        carried = tuple(attention.start(rows) for attention in self.attentions)
        return State(carried, torch.zeros(rows, dtype=torch.long, device=device))

    def reset(self, state: State, rows: Bool[Tensor, " b"]) -> State:
        """Forgets everything of some rows."""
        if not rows.any():
            return state
        pairs = zip(self.attentions, state.layers, strict=True)
        carried = tuple(attention.reset(own, rows) for attention, own in pairs)
        return State(carried, state.position.masked_fill(rows, 0))

    def forward(
        self, tokens: Int[Tensor, "b l"], state: State | None, fresh: Bool[Tensor, " b"] | None = None
    ) -> tuple[Encoding, State]:
        """Encodes the next segment of each row; rows that are ``fresh`` start a document."""
        length = tokens.shape[1]
        if length > self.positions:
            raise ValueError(f"a row of {length} tokens exceeds model.backbone.positions={self.positions}")
        state = self.start(len(tokens)) if state is None else state
        state = state if fresh is None else self.reset(state, fresh)
        position = state.position[:, None] + torch.arange(length, device=tokens.device)
        x = g = self.dropout(self.scale * self.embedding(tokens))
        carried = []
        for layer, own in zip(self.layers, state.layers, strict=True):
            x, g, after = layer(x, own, position)
            carried.append(after)
        return Encoding(self.final_norm(x), g), State(tuple(carried), state.position + length)

    def tell(self) -> None:
        """From now on ``looked`` is known."""
        for attention in self.attentions:
            attention.looked = []

    def looked(self) -> list[AttentionTrace]:
        """Where the last query looked, layer by layer."""
        return [own for attention in self.attentions for own in attention.looked or []]

    def figures(self) -> dict[str, Tensor]:
        """What the layers tell of themselves."""
        own = ((number, attention.figures()) for number, attention in enumerate(self.attentions))
        return {name.replace("layer", f"layer{number}"): value for number, found in own for name, value in found.items()}


def without_padding(pad: int | None) -> None:
    """Raises ValueError where the published code's quirk is asked of a model that it does not know."""
    if pad is not None:
        raise ValueError("compatibility.padding is a quirk of the Transformer: set compatibility=none")


def zeros(weight: Tensor, *shape: int) -> Tensor:
    """On a weight's device and in its type; ``weight.new_zeros`` would be shared out where weights are (FSDP)."""
    return torch.zeros(*shape, dtype=weight.dtype, device=weight.device)
