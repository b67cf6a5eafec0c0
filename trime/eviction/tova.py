"""Token-wise omission via attention (TOVA, Oren et al. 2024): the last query's attention weights decide."""

from __future__ import annotations

from trime.eviction.base import protect_newest
from trime.eviction.initial import OwnPosition
from trime.eviction.lra_last import LRALast
from trime.eviction.score_transform import ScoreTransform
from trime.types import Float, Int, Tensor


class TOVA(LRALast):
    """Score entries by the sum over heads of what the last query of a step gave them; ``recent`` newest entries always stay.

    ``score_transform`` is the attention weight in the paper. ValueError unless ``recent`` is at least 1.
    """

    def __init__(self, score_transform: ScoreTransform, recent: int = 1, newest_first: bool = True):
        super().__init__(OwnPosition(), score_transform, "sum", newest_first)
        if recent < 1:
            raise ValueError(f"eviction.recent={recent} must be at least 1: a query sees its own entry")
        self.recent = recent

    def compete(self, position: Int[Tensor, "b c"], score: Float[Tensor, "b c"], size: int) -> Float[Tensor, "b c"]:
        return protect_newest(position, score, self.recent)
