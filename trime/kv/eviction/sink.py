"""Attention sinks: the first entries of a document always stay, the others are first in, first out (StreamingLLM)."""

from __future__ import annotations

from trime.kv.eviction.fifo import FIFO


class Sink(FIFO):
    """Keep the first ``sinks`` entries of a row and the newest others; sinks count towards the memory's size."""

    def __init__(self, sinks: int = 4):
        super().__init__(sinks)
