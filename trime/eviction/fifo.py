"""First in, first out: the memory of Transformer-XL and the Memorizing Transformer."""

from __future__ import annotations

from trime.eviction.base import EvictionPolicy
from trime.eviction.initial import OwnPosition


class FIFO(EvictionPolicy):
    """A policy that keeps the newest entries, whatever their attention."""

    uses_attention = False
    keeps_newest = True

    def __init__(self) -> None:
        super().__init__(OwnPosition())
