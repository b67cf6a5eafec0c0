"""Rotary positions (RoPE) as scores of queries and keys: at their distances, or capped as in LM-Infinite (Attendre 4).

Keys come as they were before rotation, so that a memory may hold them at any distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from trime.models.attendre import Score
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


def rotary(form: Rotary) -> Score:
    """Scores at the true distances."""

    def score(query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
        return products(form.rotated(query, at), form.rotated(key, of))

    return score


def lm_infinite(form: Rotary, longest: int, future: str = "signed") -> Score:
    """Scores at distances of at most ``longest``, the length of pretraining: beyond, the query stands there and the key at 0.

    Keys after the query by more stand at -longest (``signed``) or, as if far behind, at +longest (``zero_max``).
    """

    def score(query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
        distance = (at[:, :, None] - of[:, None])[:, None]
        near, far = (form.rotated(x, position) for x, position in ((query, at), (query, torch.full_like(at, longest))))
        result = products(near, form.rotated(key, of))
        result = torch.where(distance.abs() <= longest, result, products(far, key))
        if future == "signed" and bool((distance < -longest).any()):
            ahead = products(form.rotated(query, torch.full_like(at, -longest)), key)
            result = torch.where(distance < -longest, ahead, result)
        return result

    return score
