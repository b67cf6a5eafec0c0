"""Token-wise omission via attention (TOVA, Oren et al. 2024): the last query's attention weights decide."""

from __future__ import annotations

from trime.kv.eviction.base import check_recent
from trime.kv.eviction.initial import OwnPosition
from trime.kv.eviction.lra_last import LRALast
from trime.kv.eviction.score_transform import ScoreTransform, Softmax


class TOVA(LRALast):
    """Score entries by the sum over heads of what the last query of a step gave them; ``recent`` newest entries always stay.

    ``score_transform`` is by default the attention weight, as in the paper. UserError unless ``recent`` is at least 1.
    """

    def __init__(
        self, score_transform: ScoreTransform | None = None, recent: int = 1, newest_first: bool = True, sinks: int = 0
    ):
        super().__init__(OwnPosition(), Softmax() if score_transform is None else score_transform, "sum", newest_first, sinks)
        self.recent = check_recent(recent)

    def protected(self, size: int) -> int:
        return self.recent
