"""Rows whose mixture was fitted on valid: the vocabulary and a list of memories, by one of trime.mixtures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from trime.memory.base import Window
from trime.mixtures.experts import Evidence, History, Mixture, evidence_of, mixed
from trime.types import Float, Mass, Tensor


@dataclass(frozen=True)
class FittedRow:
    """``fitted`` is None before the mixture was fitted."""

    kind: str  # of mixture: adaptive, calibrated
    joint: tuple[str, ...]  # the memories
    temperatures: tuple[float, ...]
    sizes: tuple[int, ...] = (0,)
    fitted: Mixture | None = None
    online: bool = False  # goes on learning from scored tokens

    asks_experts: ClassVar[bool] = True

    @property
    def memories(self) -> set[str]:
        return {*self.joint}

    @property
    def label(self) -> str:
        kind = f"{self.kind}, online" if self.online else self.kind
        return f"{kind}: {', '.join(['vocabulary', *self.joint])}"

    @property
    def mixture(self) -> str:
        return self.kind

    def choices(self) -> list[dict[str, float]]:
        """The settings of axis a: there is nothing left to choose."""
        return [{}]

    def divisors(self, joint_scale: float, layer_scale: float) -> list[float]:
        """All divisors of raw similarities, those of the experts in order."""
        return [joint_scale * t for t in self.temperatures]

    def mixture_on(self, device: torch.device) -> Mixture:
        """Return a copy of the fitted mixture on a device; what it learns there stays with it."""
        assert self.fitted is not None, "a mixture that was not fitted yet"
        return self.fitted.on(device)

    def reading(self) -> Reading:
        """What scores a text, window by window."""
        return Reading(self)


class Reading:
    """Scores windows in stream order; ``evidence`` and ``log_weights`` [n e] are what the experts said of the last one."""

    evidence: Evidence

    def __init__(self, row: FittedRow):
        assert row.fitted is not None, "a mixture that was not fitted yet"
        self.row, self.history = row, History(row.fitted.decays)
        self.mixture: Mixture | None = None
        self.log_weights = torch.empty(0)

    @torch.no_grad()
    def __call__(self, window: Window, masses: dict[str, Mass]) -> Float[Tensor, "s a n"]:
        document = window.query.place.document
        if self.mixture is None:
            self.mixture = self.row.mixture_on(document.device)
        evidence = self.evidence = evidence_of(window.vocabulary, {name: masses[name] for name in self.row.joint}, document)
        found = evidence.log_probability
        history = self.history.features(int(document[0]), found)
        self.log_weights = self.mixture.log_weights(evidence.total, history)
        self.mixture.learn(evidence, history)
        return mixed(self.log_weights, found)[None, None]

    def of_vocabulary(self, window: Window, masses: dict[str, Mass]) -> Float[Tensor, "s a n"]:
        """Return the log of the part of P(target) that the vocabulary gives, of the window that was scored last."""
        return (self.log_weights[:, 0] + self.evidence.log_probability[:, 0])[None, None]
