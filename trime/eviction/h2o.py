"""Heavy-hitter oracle (H2O, Zhang et al. 2023): the entries with the largest sum of attention weights, and the newest."""

from __future__ import annotations

from trime.eviction.initial import OwnPosition
from trime.eviction.lfa import LFA
from trime.eviction.score_transform import ScoreTransform, Softmax


class H2O(LFA):
    """Score entries by the sum of what all queries and heads gave them; a share ``recent`` of the slots is for the newest.

    ``score_transform`` is by default the attention weight, as in the paper. ValueError unless 0 <= recent <= 1.
    """

    def __init__(
        self, score_transform: ScoreTransform | None = None, recent: float = 0.5, newest_first: bool = True, sinks: int = 0
    ):
        super().__init__(OwnPosition(), score_transform or Softmax(), replaces=True, newest_first=newest_first, sinks=sinks)
        if not 0 <= recent <= 1:
            raise ValueError(f"eviction.recent={recent} is a share of the memory: choose 0 to 1")
        self.recent = recent

    def protected(self, size: int) -> int:
        return round(self.recent * size)
