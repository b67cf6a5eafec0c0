"""Rows whose mixture of the vocabulary and a list of memories is fitted on valid (trime.scoring.mixtures)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from trime.common.types import Float, LogMass, Tensor
from trime.memory.inference.base import Memory, StateScope, Window
from trime.scoring.mixtures.experts import ExpertMasses, History, Mixture, concat_masses, log_mixture, stack_masses


@dataclass(frozen=True)
class FittedMixtureSpec:
    """A row with a fitted mixture; ``fitted`` is None until the mixture has been fitted."""

    kind: str  # name of the mixture, as adaptive or calibrated
    memory_order: tuple[str, ...]  # the memories, in the order of their experts
    temperatures: tuple[float, ...]
    sizes: tuple[int, ...] = (0,)
    fitted: Mixture | None = None
    online: bool = False  # keeps learning from scored tokens

    uses_experts: ClassVar[bool] = True

    @property
    def memories(self) -> set[str]:
        return {*self.memory_order}

    @property
    def label(self) -> str:
        kind = f"{self.kind}, online" if self.online else self.kind
        return f"{kind}: {', '.join(['vocabulary', *self.memory_order])}"

    @property
    def mixture(self) -> str:
        return self.kind

    @property
    def state_scope(self) -> StateScope:
        """The history of a document, or what was learned from all text."""
        return StateScope.CORPUS if self.online else StateScope.DOCUMENT

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
        """Return a copy of the fitted mixture on a device, which keeps to itself what it learns."""
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
        self.mixture.learn(expert_masses, history)
        return log_mixture(self.log_weights, log_probability)[None, None]

    def vocabulary_log_prob(self, window: Window, masses: dict[str, LogMass]) -> Float[Tensor, "s a n"]:
        """Return the log of the vocabulary's part of P(target) for the window scored last."""
        return (self.log_weights[:, 0] + self.expert_masses.log_probability[:, 0])[None, None]

    def parts(self, window: Window, masses: dict[str, LogMass]) -> dict[str, Float[Tensor, " n"]]:
        """Return how much of P(target) comes from the vocabulary and from each memory, for the window scored last."""
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
        self.parts: list[ExpertMasses] = []

    def add(self, window: Window, masses: Mapping[str, LogMass]) -> None:
        """Add the masses [1 e n] of a window's memories, unless there are ``limit`` tokens already."""
        if self.limit is None or self.tokens < self.limit:
            self.parts.append(self.row.stack(window, masses).cpu())
            self.tokens += len(window.query.token)
            self.experts = {name: masses[name].total.shape[1] for name in self.row.memory_order}

    def masses(self) -> ExpertMasses:
        """Return the masses of all tokens in the order in which they were added."""
        return concat_masses(self.parts)

    def counts(self, memories: Mapping[str, Memory]) -> list[bool]:
        """Return for each expert whether its mass is a count."""
        of_memories = [bool(memories[name].expert_names) for name, size in self.experts.items() for _ in range(size)]
        return [False, *of_memories]
