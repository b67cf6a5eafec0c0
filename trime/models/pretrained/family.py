"""What a family of pretrained models gives to a reader: its layers in two halves, and what positions add to scores."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

from trime.models.attendre import Score
from trime.types import Float, Int, Tensor, UserError


@runtime_checkable
class Layer(Protocol):
    """A layer before and after its attention; in between, queries may wait with ``x``, the residual stream."""

    def project(self, x: Float[Tensor, "b l e"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b l h d], keys and values [b l g d], without positions."""

    def finish(self, x: Float[Tensor, "b l e"], attended: Float[Tensor, "b l h d"]) -> Float[Tensor, "b l e"]:
        """The layer's output."""


@runtime_checkable
class Family(Protocol):
    """A stack that reads tokens: a decoder, or the encoder of an encoder-decoder."""

    layers: list[Layer]
    causal: bool  # as the model was trained
    windows: list[int | None]  # of each layer, beyond which it was trained to see nothing

    @property
    def score(self) -> Score:
        """What queries make of stored keys, with their positions."""

    def stored(self, key: Float[Tensor, "b l g d"], position: Int[Tensor, "b l"]) -> Float[Tensor, "b l g d"]:
        """Keys as a memory keeps them."""

    def embed(self, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b l e"]: ...

    def last(self, x: Float[Tensor, "b l e"]) -> Float[Tensor, "b l e"]:
        """After the last layer."""


def kind_of(model: Any, supported: Collection[str]) -> str:
    """The name of a model's class; UserError where the family does not know it."""
    name = type(model).__name__
    if name not in supported:
        raise UserError(f"{name} is not supported: choose one of {', '.join(supported)}")
    return name
