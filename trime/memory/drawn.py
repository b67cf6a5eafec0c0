"""In-batch memory for every memory at test: what contexts see of the batch is drawn for each update."""

from __future__ import annotations

from typing import Any

from trime.memory.in_batch import InBatch
from trime.memory.visibility import External, Local, Long, Nothing, Others, Visibility

VISIBLE: dict[str, type[Visibility]] = {"local": Local, "long": Long, "others": Others, "all": External}


class Drawn(InBatch):
    """``shares``: of the updates, in which contexts see those of their segment (``local``), of their document (``long``), of
    other segments (``others``) or ``all``; in what is left of 1 they see none, and the vocabulary's part trains alone.

    From ``shares`` at the start to ``final`` at the end of training the change is linear (null: no change).
    """

    def __init__(self, shares: dict[str, float], final: dict[str, float] | None = None, **given: Any):
        super().__init__(External(), **given)
        self.shares, self.final = shares, shares if final is None else final
        for name, own in (("shares", self.shares), ("final", self.final)):
            if unknown := set(own) - set(VISIBLE):
                raise ValueError(f"memory.{name} names {min(unknown)}: choose from {', '.join(VISIBLE)}")
            if not (all(share >= 0 for share in own.values()) and sum(own.values()) <= 1 + 1e-9):  # nor is NaN
                raise ValueError(f"memory.{name}={own}: shares of the updates are at least 0, and at most 1 together")

    def visibility_for(self, draw: float, progress: float = 1.0) -> Visibility:
        """What contexts see in an update with this draw; in validation, whose draw is 1, all."""
        if draw >= 1:
            return External()
        for name, visibility in VISIBLE.items():
            start, end = self.shares.get(name, 0.0), self.final.get(name, 0.0)
            draw -= start + progress * (end - start)
            if draw < 0:
                return visibility()
        return Nothing()
