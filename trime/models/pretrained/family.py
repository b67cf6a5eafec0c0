"""The interface of a family of pretrained models: layers split at their attention, and scores with positions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

from trime.errors import UserError
from trime.models.attendre import Score
from trime.types import Float, Int, Tensor


@runtime_checkable
class SplitLayer(Protocol):
    """A layer, before and after its attention; queries may wait in between, with ``x``, the residual stream."""

    def project(self, x: Float[Tensor, "b l e"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [b l h d], keys and values [b l g d], without positions."""

    def finish(self, x: Float[Tensor, "b l e"], attended: Float[Tensor, "b l h d"]) -> Float[Tensor, "b l e"]:
        """Return the layer's output."""


@runtime_checkable
class Family(Protocol):
    """A stack that reads tokens: a decoder, or the encoder of an encoder-decoder."""

    layers: list[SplitLayer]
    key_heads: int  # heads of keys and values in a layer, which the heads of queries share
    causal: bool  # whether the model was trained with causal attention
    windows: list[int | None]  # sliding window of each layer, None where it was trained without one

    @property
    def score(self) -> Score:
        """The scores of queries and stored keys, with their positions."""

    def stored(self, key: Float[Tensor, "b l g d"], position: Int[Tensor, "b l"]) -> Float[Tensor, "b l g d"]:
        """Return keys as a memory stores them."""

    def embed(self, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b l e"]:
        """Return the input of the first layer."""

    def final_norm(self, x: Float[Tensor, "b l e"]) -> Float[Tensor, "b l e"]:
        """Return the stack's output from the last layer's."""


def model_class(model: Any, supported: Collection[str]) -> str:
    """Return the name of a model's class; UserError where the family does not support it."""
    name = type(model).__name__
    if name not in supported:
        raise UserError(f"{name} is not supported: choose one of {', '.join(supported)}")
    return name


def unwrapped(model: Any) -> Any:
    """Return the model that a PeftModel wraps, whose layers hold the updates already; any other as it is."""
    return model.get_base_model() if type(model).__name__.startswith("Peft") else model
