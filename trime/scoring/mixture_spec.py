"""Rows of a results table: memories, how they are mixed, and the grid of τ, τ', λ and memory sizes to tune over.

A row first joins ``joint`` memories with the vocabulary (Eq. 6, temperature τ), then interpolates one
memory softmax after the other (Eq. 9): the continuous cache, the external memory. Scores have the axes
[s a n]: memory sizes, all other settings flattened, contexts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import torch

from trime.common.types import Float, LogMass, Tensor
from trime.scoring.mixtures.experts import ExpertMasses, History, Mixture, concat_masses, log_mixture, stack_masses
from trime.scoring.mixtures.joint import interpolate, joint_log_prob, pool_masses, summed_interpolations
from trime.token_memory.test.base import Memory, StateScope, Window


@dataclass(frozen=True)
class FittedMixtureSpec:
    """A row with a fitted mixture; ``fitted`` is None until the mixture has been fitted."""

    kind: str  # name of the mixture, as adaptive or calibrated
    memory_order: tuple[str, ...]  # the memories, in the order of their experts
    temperatures: tuple[float, ...]
    sizes: tuple[int, ...] = (0,)
    fitted: Mixture | None = None

    uses_experts: ClassVar[bool] = True

    @property
    def memories(self) -> set[str]:
        return {*self.memory_order}

    @property
    def label(self) -> str:
        return f"{self.kind}: {', '.join(['vocabulary', *self.memory_order])}"

    @property
    def mixture(self) -> str:
        return self.kind

    @property
    def state_scope(self) -> StateScope:
        """The history of a document."""
        return StateScope.DOCUMENT

    def choices(self) -> list[dict[str, float]]:
        """Return the settings along axis a: a single one, since nothing is left to choose."""
        return [{}]

    def divisors(self, joint_scale: float, interpolation_scale: float) -> list[float]:
        """Return the divisors of raw similarities, in the order of the experts."""
        return [joint_scale * t for t in self.temperatures]

    def stack(self, window: Window, masses: Mapping[str, LogMass]) -> ExpertMasses:
        """Return the masses of a window's experts side by side, in the order of the row."""
        ordered = {name: masses[name] for name in self.memory_order}
        return stack_masses(window.vocabulary, ordered, window.query.positions.document)

    def mixture_on(self, device: torch.device) -> Mixture:
        """Return a copy of the fitted mixture on a device."""
        assert self.fitted is not None, "the mixture has not been fitted yet"
        return self.fitted.to(device)

    def window_scorer(self) -> FittedScorer:
        return FittedScorer(self)


class FittedScorer:
    """Scores windows in stream order; ``expert_masses`` and ``log_weights`` [n e] are of the window scored last."""

    expert_masses: ExpertMasses

    def __init__(self, row: FittedMixtureSpec):
        assert row.fitted is not None, "the mixture has not been fitted yet"
        self.row, self.history = row, History(row.fitted.decays)
        self.mixture: Mixture | None = None
        self.log_weights = torch.empty(0)

    @torch.no_grad()
    def __call__(self, window: Window, masses: dict[str, LogMass]) -> Float[Tensor, "s a n"]:
        expert_masses = self.expert_masses = self.row.stack(window, masses)
        if self.mixture is None:
            self.mixture = self.row.mixture_on(expert_masses.document.device)
        log_probability = expert_masses.log_probability
        history = self.history.features(int(expert_masses.document[0]), log_probability)
        self.log_weights = self.mixture.log_weights(expert_masses.total, history)
        return log_mixture(self.log_weights, log_probability)[None, None]

    def vocabulary_log_prob(self, window: Window, masses: dict[str, LogMass]) -> Float[Tensor, "s a n"]:
        """Return the log of the vocabulary's contribution to P(target) for the window scored last."""
        return (self.log_weights[:, 0] + self.expert_masses.log_probability[:, 0])[None, None]

    def contributions(self, window: Window, masses: dict[str, LogMass]) -> dict[str, Float[Tensor, " n"]]:
        """Return the contributions of the vocabulary and of each memory to P(target), for the window scored last."""
        return self.summed_by_memory((self.log_weights + self.expert_masses.log_probability).double().exp(), masses)

    def weights(self, masses: dict[str, LogMass]) -> dict[str, Float[Tensor, " n"]]:
        """Return the weight of the vocabulary and of each memory, for the window scored last."""
        return self.summed_by_memory(self.log_weights.double().exp(), masses)

    def summed_by_memory(self, values: Float[Tensor, "n e"], masses: dict[str, LogMass]) -> dict[str, Float[Tensor, " n"]]:
        """Return the sum of values over the experts of the vocabulary and of each memory."""
        sizes = [1, *(masses[name].total.shape[1] for name in self.row.memory_order)]
        columns = values.split(sizes, 1)
        return {name: column.sum(1) for name, column in zip(["vocabulary", *self.row.memory_order], columns, strict=True)}


class MassCollector:
    """Collects the masses of a row's experts window by window, up to ``limit`` tokens, for the fit of its mixture."""

    def __init__(self, row: FittedMixtureSpec, limit: int | None = None):
        self.row, self.limit, self.tokens = row, limit, 0
        self.experts: dict[str, int] = {}  # of each memory, in the order of the row
        self.collected: list[ExpertMasses] = []

    def add(self, window: Window, masses: Mapping[str, LogMass]) -> None:
        """Add the masses [1 e n] of a window's memories, unless there are ``limit`` tokens already."""
        if self.limit is None or self.tokens < self.limit:
            self.collected.append(self.row.stack(window, masses).cpu())
            self.tokens += len(window.query.token)
            self.experts = {name: masses[name].total.shape[1] for name in self.row.memory_order}

    def masses(self) -> ExpertMasses:
        """Return the masses of all tokens in the order in which they were added."""
        return concat_masses(self.collected)

    def counts(self, memories: Mapping[str, Memory]) -> list[bool]:
        """Return for each expert whether its mass is a count."""
        of_memories = [bool(memories[name].expert_names) for name, size in self.experts.items() for _ in range(size)]
        return [False, *of_memories]


@dataclass(frozen=True)
class Interpolation:
    """One interpolation of Eq. 9: its memories, and the grids of its temperature τ' and its share λ."""

    memories: tuple[str, ...]
    temperature: tuple[float, ...]
    share: tuple[float, ...]


@dataclass(frozen=True)
class MixtureSpec:
    """A row with its grid; a tuned row has single values."""

    joint: tuple[str, ...]
    interpolations: tuple[Interpolation, ...]
    temperature: tuple[float, ...] = (1.0,)
    sizes: tuple[int, ...] = (0,)

    @property
    def memories(self) -> set[str]:
        return {*self.joint, *(name for interpolation in self.interpolations for name in interpolation.memories)}

    @property
    def label(self) -> str:
        joined = ["vocabulary", *self.joint]
        interpolated = [f"({' + '.join(interpolation.memories)})" for interpolation in self.interpolations]
        return " ⊕ ".join([" + ".join(joined), *interpolated])

    @property
    def mixture(self) -> str:
        return "interpolate" if self.interpolations else "joint"

    uses_experts: ClassVar[bool] = False
    state_scope: ClassVar[StateScope] = StateScope.NONE  # beside the state of its memories

    def window_scorer(self) -> GridScorer:
        return GridScorer(self)

    def divisors(self, joint_scale: float, interpolation_scale: float) -> list[float]:
        """Return the divisors of raw similarities, the joint ones first, so that one search serves them all."""
        joint_divisors = [joint_scale * t for t in self.temperature] if self.joint else []
        return joint_divisors + [interpolation_scale * t for each in self.interpolations for t in each.temperature]

    def score(self, vocabulary: LogMass, masses: dict[str, LogMass]) -> Float[Tensor, "s a n"]:
        """Return log P(target) over the grid; ``masses`` are [s t n] over the divisors of this row."""

        def columns(names: tuple[str, ...], low: int, high: int) -> list[LogMass]:
            return [LogMass(masses[name].target[:, low:high], masses[name].total[:, low:high]) for name in names]

        start = len(self.temperature) if self.joint else 0
        result = joint_log_prob(vocabulary, columns(self.joint, 0, start))
        result = result if self.joint else result[None, None]
        for interpolation in self.interpolations:
            end = start + len(interpolation.temperature)
            memory = pool_masses(columns(interpolation.memories, start, end))
            # Every base with every temperature and every share: the new axis a is a · t · shares.
            share = result.new_tensor(interpolation.share)[None, None, None, :, None]
            grid = LogMass(memory.target[:, None, :, None], memory.total[:, None, :, None])
            result, start = interpolate(result[:, :, None, None], grid, share).flatten(1, 3), end
        return result

    def losses(self, vocabulary: LogMass, masses: dict[str, LogMass]) -> Float[Tensor, "s a"]:
        """Return -log P(target) over the grid, summed over a window's tokens."""
        if not self.interpolations:
            return -self.score(vocabulary, masses).double().sum(-1)
        *earlier, last = self.interpolations
        base = replace(self, interpolations=tuple(earlier)).score(vocabulary, masses)
        start = len(masses[last.memories[0]].total[0]) - len(last.temperature)
        memory = pool_masses([LogMass(masses[name].target[:, start:], masses[name].total[:, start:]) for name in last.memories])
        return -summed_interpolations(base, memory, last.share).flatten(1)

    @property
    def names(self) -> list[tuple[str, str]]:
        """Return the names of each interpolation's temperature and share; all but the last are a cache's."""
        cache, last = ("cache_temperature", "cache_lambda"), ("interpolation_temperature", "lambda")
        return [cache] * (len(self.interpolations) - 1) + [last] * bool(self.interpolations)

    def choices(self) -> list[dict[str, float]]:
        """Return the settings along axis a, in order."""
        axes: list[list[dict[str, float]]] = [[{"temperature": t} for t in self.temperature] if self.joint else [{}]]
        for interpolation, (temperature, share) in zip(self.interpolations, self.names, strict=True):
            axes += [[{temperature: t} for t in interpolation.temperature], [{share: s} for s in interpolation.share]]
        return [dict(item for setting in settings for item in setting.items()) for settings in product(*axes)]

    def with_settings(self, chosen: dict[str, float]) -> MixtureSpec:
        """Return the row with only the chosen settings."""
        temperature = (chosen["temperature"],) if self.joint else self.temperature
        interpolations = tuple(
            Interpolation(interpolation.memories, (chosen[t],), (chosen[share],))
            for interpolation, (t, share) in zip(self.interpolations, self.names, strict=True)
        )
        sizes = (int(chosen["memory_size"]),) if "memory_size" in chosen else self.sizes
        return MixtureSpec(self.joint, interpolations, temperature, sizes)


class GridScorer:
    """Scores each window by itself over the grid of a row."""

    def __init__(self, row: MixtureSpec):
        self.row = row

    def __call__(self, window: Window, masses: dict[str, LogMass]) -> Float[Tensor, "s a n"]:
        return self.row.score(window.vocabulary, masses)

    def vocabulary_log_prob(self, window: Window, masses: dict[str, LogMass]) -> Float[Tensor, "s a n"]:
        """Return the log of the vocabulary's contribution to P(target) for the window scored last."""
        return self(window, {name: without_target(mass) for name, mass in masses.items()})

    def contributions(self, window: Window, masses: dict[str, LogMass]) -> dict[str, Float[Tensor, " n"]]:
        """Return the contributions of the vocabulary and of each memory to P(target), for the window scored last."""
        # P is linear in the memories' masses of the target while totals stay: a memory contributes what is lost without it.
        whole = self(window, masses)[0, 0].double().exp()
        others = {name: self(window, masses | {name: without_target(mass)})[0, 0] for name, mass in masses.items()}
        vocabulary = self.vocabulary_log_prob(window, masses)[0, 0].double().exp()
        return {"vocabulary": vocabulary} | {name: whole - other.double().exp() for name, other in others.items()}

    def weights(self, masses: dict[str, LogMass]) -> dict[str, Float[Tensor, " n"]]:
        """Return no weights: Eq. 6 has none, and those of Eq. 8 are the same for every token."""
        return {}


def without_target(mass: LogMass) -> LogMass:
    """Return the mass without the target."""
    return LogMass(torch.full_like(mass.target, -math.inf), mass.total)


def scales(width: int, scaled_interpolation: bool) -> tuple[float, float]:
    """Return the divisors of raw similarities at τ = 1 and τ' = 1: √d, and √d (Eq. 8) or 1 (the published code)."""
    return math.sqrt(width), math.sqrt(width) if scaled_interpolation else 1.0
