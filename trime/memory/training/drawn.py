"""In-batch memory that prepares for every memory at test: the visibility is drawn at random for each update."""

from __future__ import annotations

from trime.common.choices import Metric
from trime.memory.training.in_batch import InBatch
from trime.memory.training.visibility import External, Local, Long, Nothing, Others, Visibility

VISIBLE: dict[str, type[Visibility]] = {"local": Local, "long": Long, "others": Others, "all": External}


class Drawn(InBatch):
    """In-batch memory with a visibility drawn for each update.

    ``shares``: the share of updates in which contexts see those of their segment (``local``), of their document
    (``long``), of other segments (``others``) or ``all``; in the rest they see none, and the vocabulary trains alone.
    Shares change linearly to ``final`` at the end of training (None: no change). ValueError for an unknown name, a
    negative share or shares of more than 1 together. The other arguments are those of ``InBatch``.
    """

    def __init__(
        self,
        shares: dict[str, float],
        final: dict[str, float] | None = None,
        own_gradient_only: bool = False,
        gradient: bool = True,
        stale: int = 0,
        temperature: float = 1.0,
        metric: Metric = "ip",
    ):
        super().__init__(External(), 0.0, own_gradient_only, gradient, stale, temperature, metric)
        self.shares, self.final = shares, shares if final is None else final
        for name, shares in (("shares", self.shares), ("final", self.final)):
            if unknown := set(shares) - set(VISIBLE):
                raise ValueError(f"memory.{name} names {min(unknown)}: choose from {', '.join(VISIBLE)}")
            if not (all(share >= 0 for share in shares.values()) and sum(shares.values()) <= 1 + 1e-9):  # also catches NaN
                raise ValueError(f"memory.{name}={shares}: shares of the updates must be at least 0, and at most 1 together")

    def visibility_for(self, draw: float | None, progress: float = 1.0) -> Visibility:
        """Return the visibility of an update with this draw; validation (None) sees all."""
        if draw is None:
            return External()
        for name, visibility in VISIBLE.items():
            start, end = self.shares.get(name, 0.0), self.final.get(name, 0.0)
            draw -= start + progress * (end - start)
            if draw < 0:
                return visibility()
        return Nothing()
