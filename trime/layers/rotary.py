"""Rotary positions (RoPE) as scores of queries and keys, at their true distances or capped as in LM-Infinite (Attendre 4).

A memory may hold keys before rotation, so that they can be at any distance, or after it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from trime.common.types import Bool, Float, Int, Tensor
from trime.layers.attention_cpu import runs_on_cpu

RUN = 128  # slots in a block: for fewer, a product of its own would not pay
NEVER = 2**62  # a position after all others
FEW = 8  # queries, as of generated tokens, for which a product for each head costs more than a copy of the keys


@dataclass(frozen=True)
class Rotary:
    """A model's rotation: pairs of a head's numbers, in halves (Llama, NeoX) or interleaved, at these frequencies."""

    frequency: Float[Tensor, " w"]  # numbers of a head beyond 2 w are not rotated
    interleaved: bool = False
    scale: float = 1.0  # multiplies queries and keys after rotation

    @classmethod
    def of(cls, width: int, base: float = 10000.0, interleaved: bool = False) -> Rotary:
        """Return the rotation with frequencies base^(-2i / width)."""
        return cls(base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width), interleaved)

    def rotate(self, x: Float[Tensor, "b l h d"], position: Int[Tensor, "b p"]) -> Float[Tensor, "b l h d"]:
        """Return x rotated to its positions, or all to the same one (p = 1)."""
        angle = (position[..., None] * self.frequency.to(x.device))[:, :, None]
        return self.turned(x, angle.cos(), angle.sin())

    def turned(self, x: Float[Tensor, "b l h d"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b l h d"]:
        """Return x with each pair turned by the angles of these cosines and sines."""
        width = 2 * len(self.frequency)
        cos, sin = (self.scale * wave.to(x) for wave in (cos, sin))
        turned, rest = x[..., :width], x[..., width:]
        first, second = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        pair = first * cos - second * sin, second * cos + first * sin
        rotated = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([rotated, rest], -1)


def interpolate_positions(rotary: Rotary, factor: float) -> Rotary:
    """Return the rotation with position interpolation (Chen et al. 2023): all positions are ``factor`` times closer."""
    return replace(rotary, frequency=rotary.frequency / factor)


def ntk_aware(rotary: Rotary, factor: float) -> Rotary:
    """Return the rotation with a larger base: the lowest frequency is divided by ``factor``, the highest kept (YaRN Eq. 16)."""
    steps = torch.arange(len(rotary.frequency), dtype=torch.float64, device=rotary.frequency.device)
    return replace(rotary, frequency=rotary.frequency * factor ** (-steps / max(len(steps) - 1, 1)))


def yarn(rotary: Rotary, factor: float, longest: int, slow: float = 1.0, fast: float = 32.0) -> Rotary:
    """Return the rotation of YaRN (Peng et al. 2023, Eq. 18 to 22), for a model trained on ``longest`` positions."""
    # Frequencies of fewer than ``slow`` turns are interpolated, of more than ``fast`` kept.
    turns = longest * rotary.frequency / (2 * math.pi)
    ramp = ((turns - slow) / (fast - slow)).clamp(0, 1)
    frequency = (1 - ramp) * rotary.frequency / factor + ramp * rotary.frequency
    # Queries and keys are both scaled: logits grow by (0.1 ln factor + 1)^2.
    return replace(rotary, frequency=frequency, scale=rotary.scale * (0.1 * math.log(factor) + 1))


def dot_products(
    query: Float[Tensor, "b q h d"], key: Float[Tensor, "b m g d"], needed: Bool[Tensor, "b m"] | None = None
) -> Float[Tensor, "b h q m"]:
    """Return q k / sqrt(d); consecutive heads of queries share a head of keys. Keys that are not ``needed`` may be left out."""
    groups, heads = key.shape[2], query.shape[2]
    by_group = query.transpose(1, 2).unflatten(1, (groups, -1)).flatten(2, 3) / query.shape[-1] ** 0.5  # one product a group
    if query.shape[1] < FEW:  # a copy of keys that lie together is cheaper than products that read them apart
        products = by_group @ key.transpose(1, 2).contiguous().mT
    elif runs_on_cpu(query, key):  # head by head, since a batched product would first copy the keys
        products = by_group.new_empty(*by_group.shape[:3], key.shape[1])
        runs = [slice(None)]
        if needed is not None:  # the runs of blocks in which some row needs a slot
            blocks = F.pad(needed.any(0), (0, -needed.shape[1] % RUN)).view(-1, RUN).any(1)
            edges = RUN * F.pad(blocks.byte(), (1, 1)).diff().nonzero()
            runs = [slice(first, last) for first, last in edges.view(-1, 2).tolist()]
        for row, group, run in itertools.product(range(len(key)), range(groups), runs):
            torch.mm(by_group[row, group], key[row, run, group].T, out=products[row, group][:, run])
    else:
        products = by_group @ key.permute(0, 2, 3, 1)
    return products.unflatten(2, (heads // groups, -1)).flatten(1, 2).contiguous()


@dataclass(frozen=True)
class RotaryScore:
    """Scores at the true distances or, with a ``longest``, at distances of at most that, as in LM-Infinite.

    ``longest`` is the length of pretraining: where the distance is larger, the query is placed there and the key at 0. Keys
    that follow the query by more than that are placed at distance -longest (``future=signed``) or, as if far behind, +longest
    (``zero_max``). Keys are stored before and after rotation, side by side, so that no step rotates what is stored; with
    ``stored_rotated`` only after it: that takes half the space, and keys at capped distances are rotated back.
    """

    rotary: Rotary
    longest: int | None = None
    future: str = "signed"
    stored_rotated: bool = False

    def stored(self, key: Float[Tensor, "b l g d"], position: Int[Tensor, "b l"]) -> Float[Tensor, "b l g s"]:
        """Return keys as a memory stores them."""
        rotated = self.rotary.rotate(key, position)
        return rotated if self.stored_rotated else torch.cat([key, rotated], -1)

    def unpack(self, key: Tensor, of: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return keys before rotation, or after it where only that is stored, and after it; ``width`` is a query's."""
        if key.shape[-1] > width:
            before, rotated = key.split(width, -1)
            return before, rotated
        return key, key if self.stored_rotated else self.rotary.rotate(key, of)

    def __call__(self, query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
        """Return scores [b h q m] of queries [b q h d] at positions ``at`` and keys at ``of``, stored or before rotation."""
        key, rotated = self.unpack(key, of, query.shape[-1])
        result = dot_products(self.rotary.rotate(query, at), rotated)
        if self.longest is None:
            return result
        distance = (at[:, :, None] - of[:, None])[:, None]
        if bool((distance > self.longest).any()) or self.future == "zero_max":
            beyond = distance > self.longest if self.future == "signed" else distance.abs() > self.longest
            result = torch.where(beyond, self.clamped_scores(query, self.longest, key, of), result)
        if self.future == "signed" and bool((distance < -self.longest).any()):
            result = torch.where(distance < -self.longest, self.clamped_scores(query, -self.longest, key, of), result)
        return result

    def causal_parts(
        self, query: Float[Tensor, "b q h d"], at: Int[Tensor, "b q"], key: Float[Tensor, "b m g s"], of: Int[Tensor, "b m"]
    ) -> tuple[Float[Tensor, "b h q m"], Float[Tensor, "b h q m"] | None]:
        """Return the scores at the true distances and those at ``longest``, which count beyond it; None: nothing lies there."""
        key, rotated = self.unpack(key, of, query.shape[-1])
        turned = self.rotary.rotate(query, at)
        if self.longest is None or not at.shape[1]:  # no query: all of a step wait
            return dot_products(turned, rotated), None
        # Scores that do not count need not be computed: of later keys, or those that the other distance is for.
        beyond = (of >= 0) & (at.amax(1, keepdim=True) - of > self.longest)
        if not bool(beyond.any()):
            return dot_products(turned, rotated), None
        first = at.masked_fill(at < 0, NEVER).amin(1, keepdim=True)
        near = dot_products(turned, rotated, (of >= 0) & (first - of <= self.longest))
        return near, self.clamped_scores(query, self.longest, key, of, beyond)

    def clamped_scores(
        self, query: Tensor, distance: int, key: Tensor, of: Tensor, needed: Tensor | None = None
    ) -> Float[Tensor, "b h q m"]:
        """Return scores with all queries at a fixed ``distance`` from the keys; those not ``needed`` may be left out."""
        at = torch.full((len(query), 1), distance, device=query.device)  # of all queries
        if self.stored_rotated:
            origin = replace(self.rotary, scale=1.0).rotate(key, -of)
        else:  # a rotation to position 0 only scales
            origin = key if self.rotary.scale == 1 else self.rotary.rotate(key, torch.zeros_like(of))
        return dot_products(self.rotary.rotate(query, at), origin, needed)
