"""First in, first out: the memory of Transformer-XL and the Memorizing Transformer."""

from __future__ import annotations

from trime.kv.eviction.base import EvictionPolicy
from trime.kv.eviction.initial import OwnPosition


class FIFO(EvictionPolicy):
    """A policy that keeps the newest entries, whatever their attention."""

    uses_attention = False

    def __init__(self, sinks: int = 0) -> None:
        super().__init__(OwnPosition(), sinks=sinks)
        self.keeps_newest = not sinks
