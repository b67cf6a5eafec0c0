"""Key norm (Devoto et al. 2024): entries whose keys have small norms stay, for they tend to get most attention."""

from __future__ import annotations

from trime.common.types import Float, Int, Ranking, Tensor
from trime.kv.eviction.base import EvictionPolicy, check_recent
from trime.kv.eviction.initial import OwnPosition


class KeyNorm(EvictionPolicy):
    """Score entries by minus the norm of their keys, over all heads; ``recent`` newest entries always stay.

    Where a memory stores keys before and after rotation, whose norms are the same, both count. UserError if recent < 1.
    """

    uses_attention, needs_keys = False, True

    def __init__(self, recent: int = 1, newest_first: bool = True, sinks: int = 0):
        super().__init__(OwnPosition(), newest_first, sinks)
        self.recent = check_recent(recent)

    def admit_entries(
        self, columns: tuple[Tensor, ...], ranking: Ranking, position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b n"]:
        """Return minus the norm of each new entry's keys, the first of ``columns``."""
        return -columns[0].detach().double().flatten(2).norm(dim=2)

    def protected(self, size: int) -> int:
        return self.recent
