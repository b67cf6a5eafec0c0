"""First in, first out: the memory of Transformer-XL and the Memorizing Transformer."""

from __future__ import annotations

from trime.eviction.base import EvictionPolicy, Summary, latest
from trime.eviction.initial import OwnPosition
from trime.types import Attended, Float, Ranking, Tensor


class FIFO(EvictionPolicy):
    """The newest entries stay, whatever attention does."""

    by_attention = False
    is_window = True

    def __init__(self) -> None:
        super().__init__(OwnPosition())

    def added(self, summary: Summary, block: Attended) -> Summary:
        return summary._replace(last=latest(summary, block))

    def renewed(self, ranking: Ranking, summary: Summary) -> Float[Tensor, "b m"]:
        return ranking.score
