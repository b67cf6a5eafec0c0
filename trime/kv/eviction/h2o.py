"""Heavy-hitter oracle (H2O, Zhang et al. 2023): the entries with the largest sum of attention weights, and the newest."""

from __future__ import annotations

from trime.common.checks import check_number
from trime.kv.eviction.initial import OwnPosition
from trime.kv.eviction.lfa import LFA
from trime.kv.eviction.score_transform import ScoreTransform, Softmax


class H2O(LFA):
    """Score entries by the sum of what all queries and heads gave them; a share ``recent`` of the slots is for the newest.

    ``score_transform`` is by default the attention weight, as in the paper. UserError unless 0 <= recent <= 1.
    """

    def __init__(
        self, score_transform: ScoreTransform | None = None, recent: float = 0.5, newest_first: bool = True, sinks: int = 0
    ):
        transform = Softmax() if score_transform is None else score_transform
        super().__init__(OwnPosition(), transform, replaces=True, newest_first=newest_first, sinks=sinks)
        check_number("eviction.recent", recent, at_least=0, at_most=1)
        self.recent = recent

    def protected(self, size: int) -> int:
        return round(self.recent * size)
