"""Rotary positions (RoPE) as scores of queries and keys: at their distances, or capped as in LM-Infinite (Attendre 4).

A memory may hold keys as they were before rotation, at any distance, or after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from trime.types import Float, Int, Tensor


@dataclass(frozen=True)
class Rotary:
    """How a model rotates: pairs of numbers of a head, in halves (Llama, NeoX) or side by side, at these frequencies.

    Numbers of a head beyond twice as many pass as they are. ``scale``: of what is turned (1, but for some models).
    """

    frequency: Float[Tensor, " w"]
    interleaved: bool = False
    scale: float = 1.0

    @classmethod
    def of(cls, width: int, base: float = 10000.0, interleaved: bool = False) -> Rotary:
        """base^(-2i / width)."""
        return cls(base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width), interleaved)

    def rotated(self, x: Float[Tensor, "b l h d"], position: Int[Tensor, "b l"]) -> Float[Tensor, "b l h d"]:
        """x at its positions."""
        width = 2 * len(self.frequency)
        angle = (position[..., None] * self.frequency.to(x.device))[:, :, None]
        cos, sin = (self.scale * part.to(x) for part in (angle.cos(), angle.sin()))
        turned, rest = x[..., :width], x[..., width:]
        pairs = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        one, other = pairs[0] * cos - pairs[1] * sin, pairs[1] * cos + pairs[0] * sin
        joined = torch.stack([one, other], -1).flatten(-2) if self.interleaved else torch.cat([one, other], -1)
        return torch.cat([joined, rest], -1)


def interpolated(form: Rotary, factor: float) -> Rotary:
    """Position interpolation (Chen et al. 2023): all positions ``factor`` times closer."""
    return replace(form, frequency=form.frequency / factor)


def ntk_aware(form: Rotary, factor: float) -> Rotary:
    """A larger base: the lowest frequency is divided by ``factor``, the highest stays (YaRN, Eq. 16)."""
    steps = torch.arange(len(form.frequency), dtype=torch.float64, device=form.frequency.device)
    return replace(form, frequency=form.frequency * factor ** (-steps / max(len(steps) - 1, 1)))


def yarn(form: Rotary, factor: float, longest: int, slow: float = 1.0, fast: float = 32.0) -> Rotary:
    """YaRN (Peng et al. 2023, Eq. 18 to 22): interpolates what turns less than ``slow`` times over ``longest``
    positions, nothing that turns more than ``fast`` times, and scales the logits by (0.1 ln factor + 1)^2.
    """
    turns = longest * form.frequency / (2 * math.pi)
    kept = ((turns - slow) / (fast - slow)).clamp(0, 1)
    frequency = (1 - kept) * form.frequency / factor + kept * form.frequency
    return replace(form, frequency=frequency, scale=form.scale * (0.1 * math.log(factor) + 1))


def products(query: Float[Tensor, "b q h d"], key: Float[Tensor, "b m g d"]) -> Float[Tensor, "b h q m"]:
    """q k / sqrt(d); heads of queries share heads of keys in order."""
    asked = query.transpose(1, 2).unflatten(1, (key.shape[2], -1)) / query.shape[-1] ** 0.5
    return (asked @ key.permute(0, 2, 3, 1)[:, :, None]).flatten(1, 2)


@dataclass(frozen=True)
class RotaryScore:
    """Scores at the true distances, or, with a ``longest``, as in LM-Infinite: at distances of at most that.

    ``longest`` is the length of pretraining: beyond it the query stands there and the key at 0. Keys after the query
    by more stand at -longest (``future=signed``) or, as if far behind, at +longest (``zero_max``). Keys are kept as they
    were before rotation, or ``after`` it: then a step rotates no key again, but for what LM-Infinite caps.
    """

    form: Rotary
    longest: int | None = None
    future: str = "signed"
    after: bool = False

    def stored(self, key: Float[Tensor, "b l g d"], position: Int[Tensor, "b l"]) -> Float[Tensor, "b l g d"]:
        """Keys as a memory keeps them."""
        return self.form.rotated(key, position) if self.after else key

    def __call__(self, query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
        """Of queries [b q h d] at their positions and stored keys [b m g d] at theirs [b h q m]."""
        result = products(self.form.rotated(query, at), key if self.after else self.form.rotated(key, of))
        if self.longest is None:
            return result
        distance = (at[:, :, None] - of[:, None])[:, None]
        if bool((distance > self.longest).any()) or self.future == "zero_max":
            beyond = distance > self.longest if self.future == "signed" else distance.abs() > self.longest
            result = torch.where(beyond, self.capped(query, self.longest, key, of), result)
        if self.future == "signed" and bool((distance < -self.longest).any()):
            result = torch.where(distance < -self.longest, self.capped(query, -self.longest, key, of), result)
        return result

    def capped(self, query: Tensor, place: int, key: Tensor, of: Tensor) -> Float[Tensor, "b h q m"]:
        """Scores with the queries at ``place``, the keys at 0."""
        at = torch.full(query.shape[:2], place, device=query.device)
        if self.after:
            origin = replace(self.form, scale=1.0).rotated(key, -of)
        else:
            origin = key if self.form.scale == 1 else self.form.rotated(key, torch.zeros_like(of))
        return products(self.form.rotated(query, at), origin)
