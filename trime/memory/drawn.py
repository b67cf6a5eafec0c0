"""In-batch memory that prepares for every memory at test: the visibility is drawn at random for each update."""

from __future__ import annotations

from typing import Any

from trime.memory.in_batch import InBatch
from trime.memory.visibility import External, Local, Long, Nothing, Others, Visibility

VISIBLE: dict[str, type[Visibility]] = {"local": Local, "long": Long, "others": Others, "all": External}


class Drawn(InBatch):
    """In-batch memory with a visibility drawn for each update.

    ``shares``: the share of updates in which contexts see those of their segment (``local``), of their document
    (``long``), of other segments (``others``) or ``all``; in the rest they see none, and the vocabulary trains alone.
    Shares change linearly to ``final`` at the end of training (null: no change). ValueError for an unknown name, a
    negative share or shares of more than 1 together.
    """

    def __init__(self, shares: dict[str, float], final: dict[str, float] | None = None, **options: Any):
        super().__init__(External(), **options)
        self.shares, self.final = shares, shares if final is None else final
        for name, shares in (("shares", self.shares), ("final", self.final)):
            if unknown := set(shares) - set(VISIBLE):
                raise ValueError(f"memory.{name} names {min(unknown)}: choose from {', '.join(VISIBLE)}")
            if not (all(share >= 0 for share in shares.values()) and sum(shares.values()) <= 1 + 1e-9):  # also catches NaN
                raise ValueError(f"memory.{name}={shares}: shares of the updates must be at least 0, and at most 1 together")

    def visibility_for(self, draw: float, progress: float = 1.0) -> Visibility:
        """Return the visibility of an update with this draw; validation, with draw 1, sees all."""
        if draw >= 1:
            return External()
        for name, visibility in VISIBLE.items():
            start, end = self.shares.get(name, 0.0), self.final.get(name, 0.0)
            draw -= start + progress * (end - start)
            if draw < 0:
                return visibility()
        return Nothing()
