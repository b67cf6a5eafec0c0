"""Rows of a table: which memories, mixed how, over which grid of τ, τ', λ and memory sizes.

A row first joins ``joint`` memories with the vocabulary (Eq. 6, temperature τ), then interpolates one
memory softmax after the other (Eq. 9): the continuous cache, the external memory. Axes of a score are
[s a n]: memory sizes, all other choices flattened, contexts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch

from trime.memory.base import Window
from trime.mixtures.interpolate import interpolate
from trime.mixtures.joint import joint, union
from trime.types import Float, Mass, Tensor, UserError

INTERPOLATED = ("datastore", "all")  # the memories of Eq. 8's P_kNN, as ``evaluate.interpolate`` names them


@dataclass(frozen=True)
class Layer:
    """One interpolation: memories, and the grids of its temperature and share."""

    memories: tuple[str, ...]
    temperature: tuple[float, ...]
    share: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """A row with its grid; single values where tuned."""

    joint: tuple[str, ...]
    layers: tuple[Layer, ...]
    temperature: tuple[float, ...] = (1.0,)
    sizes: tuple[int, ...] = (0,)

    @property
    def memories(self) -> set[str]:
        return {*self.joint, *(name for layer in self.layers for name in layer.memories)}

    @property
    def label(self) -> str:
        parts = ["vocabulary", *self.joint]
        mixed = [f"({' + '.join(layer.memories)})" for layer in self.layers]
        return " ⊕ ".join([" + ".join(parts), *mixed])

    @property
    def mixture(self) -> str:
        return "interpolate" if self.layers else "joint"

    asks_experts: ClassVar[bool] = False

    def reading(self) -> GridReading:
        """Return what scores a text, window by window."""
        return GridReading(self)

    def divisors(self, joint_scale: float, layer_scale: float) -> list[float]:
        """All divisors of raw similarities, the joint ones first: one search serves them all."""
        own = [joint_scale * t for t in self.temperature] if self.joint else []
        return own + [layer_scale * t for layer in self.layers for t in layer.temperature]

    def score(self, vocabulary: Mass, masses: dict[str, Mass]) -> Float[Tensor, "s a n"]:
        """log P(target) over the grid; ``masses`` are [s t n] over the divisors of this row."""
        done = len(self.temperature) if self.joint else 0
        own = [cut(masses[name], 0, done) for name in self.joint]
        result = joint(vocabulary, own)
        result = result if own else result[None, None]
        for layer in self.layers:
            after = done + len(layer.temperature)
            memory = union([cut(masses[name], done, after) for name in layer.memories])
            result, done = mixed(result, memory, layer.share), after
        return result

    @property
    def names(self) -> list[tuple[str, str]]:
        """What the temperature and the share of each layer are called: all but the last are a cache's."""
        cache, last = ("cache_temperature", "cache_lambda"), ("interpolation_temperature", "lambda")
        return [cache] * (len(self.layers) - 1) + [last] * bool(self.layers)

    def choices(self) -> list[dict[str, float]]:
        """The settings of axis a, in order."""
        axes: list[list[dict[str, float]]] = [[{"temperature": t} for t in self.temperature] if self.joint else [{}]]
        for layer, (temperature, share) in zip(self.layers, self.names, strict=True):
            axes += [[{temperature: t} for t in layer.temperature], [{share: s} for s in layer.share]]
        return [dict(item for part in parts for item in part.items()) for parts in product(*axes)]

    def at(self, chosen: dict[str, float]) -> Row:
        """The row at one choice."""
        temperature = (chosen["temperature"],) if self.joint else self.temperature
        layers = tuple(
            Layer(layer.memories, (chosen[t],), (chosen[share],))
            for layer, (t, share) in zip(self.layers, self.names, strict=True)
        )
        sizes = (int(chosen["memory_size"]),) if "long" in self.memories else self.sizes
        return Row(self.joint, layers, temperature, sizes)


class GridReading:
    """Scores windows over the grid of a row, each by itself."""

    def __init__(self, row: Row):
        self.row = row

    def __call__(self, window: Window, masses: dict[str, Mass]) -> Float[Tensor, "s a n"]:
        return self.row.score(window.vocabulary, masses)

    def of_vocabulary(self, window: Window, masses: dict[str, Mass]) -> Float[Tensor, "s a n"]:
        """Return the log of the part of P(target) that the vocabulary gives, of the window that was scored last."""
        without = {name: Mass(torch.full_like(mass.target, -math.inf), mass.total) for name, mass in masses.items()}
        return self(window, without)


def cut(mass: Mass, start: int, end: int) -> Mass:
    """The divisors start to end of a mass [s t n]."""
    return Mass(mass.target[:, start:end], mass.total[:, start:end])


def mixed(base: Float[Tensor, "_ a n"], memory: Mass, shares: tuple[float, ...]) -> Float[Tensor, "_ _ n"]:
    """Every base with every temperature of the memory and every share: b = a · t · shares."""
    share = base.new_tensor(shares)[None, None, None, :, None]
    inside = Mass(memory.target[:, None, :, None], memory.total[:, None, :, None])
    return interpolate(base[:, :, None, None], inside, share).flatten(1, 3)


def papers_rows(specifications: Any, grid: Any, known: tuple[str, ...]) -> list[Row]:
    """Rows as conf/experiment states them, each over the grid that conf/config.yaml's tune states; ``known``: all memories."""
    if not isinstance(specifications, list) or not specifications:
        raise UserError(f"evaluate.rows={specifications}: name at least one row, for instance [{{joint: [local]}}]")
    return [row_of(specification, grid, known) for specification in specifications]


def row_of(given: Any, grid: Any, known: tuple[str, ...]) -> Row:
    """One row: {joint: [names], interpolate: [[names], ...]}."""
    specification = dict(given) if isinstance(given, dict) else {f"{given}": None}
    joined = tuple(specification.pop("joint", None) or ())
    layers = tuple(
        Layer(interpolated(names, joined), tuple(grid.interpolation_temperature), tuple(grid["lambda"]))
        for names in specification.pop("interpolate", None) or ()
    )
    row = Row(joined, layers, tuple(grid.temperature) if joined else (1.0,))
    unknown = [*specification, *(row.memories - set(known))]
    if unknown or len(layers) > 2 or any(not layer.memories for layer in layers):
        raise UserError(
            f"evaluate.rows: {unknown or layers} is not understood: "
            f"a row is {{joint: [...], interpolate: [[...]]}} over the memories {', '.join(known)}, at most two layers"
        )
    if any(not 0 < share < 1 for layer in layers for share in layer.share):
        raise UserError(f"tune.lambda={list(grid['lambda'])} must lie strictly between 0 and 1")
    if any(t <= 0 for t in (*row.temperature, *grid.interpolation_temperature)):
        raise UserError("tune.temperature and tune.interpolation_temperature must be positive")
    if "long" in row.memories and (not grid.memory_size or min(grid.memory_size) < 1):
        raise UserError(f"tune.memory_size={list(grid.memory_size)}: a long-term memory holds at least one context")
    return Row(joined, layers, row.temperature, tuple(grid.memory_size) if "long" in row.memories else (0,))


def interpolated(names: str | list[str], joined: tuple[str, ...]) -> tuple[str, ...]:
    """Return the memories of an interpolation: those named, the datastore alone, or all that the row joins (Eq. 8)."""
    if isinstance(names, str):
        return {"datastore": ("external",), "all": joined}.get(names, (names,))
    return tuple(names)


def scales(width: int, scaled_interpolation: bool) -> tuple[float, float]:
    """Divisors of raw similarity at τ = 1 and τ' = 1: √d, and √d (Eq. 8) or 1 (the published code)."""
    return math.sqrt(width), math.sqrt(width) if scaled_interpolation else 1.0
