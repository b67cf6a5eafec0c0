"""Long-term memory at test: the last M contexts before the window (TRIME section 4.2; Grave et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from trime.common.checks import check_number, shown
from trime.common.types import Contexts, Float, LogMass, Tensor
from trime.errors import UserError
from trime.memory.training.objective.blockwise import blockwise_mass
from trime.memory.training.visibility import Everything, SameDocument


class FifoTokenMemory:
    """The ``max(sizes)`` contexts written last, first in, first out; all sizes are evaluated at once.

    ``across_documents`` shows entries of earlier documents too, as published. The ``overlap`` newest entries, which the window
    itself contains as context, are skipped, and sizes count from there, unless ``include_window`` (as published, which counts
    them twice).
    """

    def __init__(self, sizes: list[int], across_documents: bool = False, include_window: bool = False, metric: str = "ip"):
        self.sizes, self.include_window, self.metric = check_sizes(sizes), include_window, metric
        self.visibility = Everything() if across_documents else SameDocument()
        self.contexts: Contexts | None = None

    def reset(self) -> None:
        self.contexts = None

    def write(self, contexts: Contexts, keep_extra: int = 0) -> None:
        """Add the newest entries, oldest first; keep ``keep_extra`` more than the largest size, for overlaps to come."""
        joined = contexts if self.contexts is None else Contexts.concat([self.contexts, contexts])
        self.contexts = joined.take(slice(max(0, len(joined.token) - self.sizes[-1] - keep_extra), None))

    @property
    def bytes(self) -> int:
        return 0 if self.contexts is None else self.contexts.bytes

    def visible_count(self, overlap: int) -> int:
        """Return the number of entries that a window sees which itself contains the ``overlap`` newest."""
        return 0 if self.contexts is None else max(0, len(self.contexts.token) - (0 if self.include_window else overlap))

    def entries(self, query: Contexts, overlap: int = 0) -> Contexts:
        """Return the entries that queries of a document see at the largest size."""
        if self.contexts is None:
            return query.take(slice(0, 0))
        count = self.visible_count(overlap)
        newest = self.contexts.take(slice(max(0, count - self.sizes[-1]), count))
        return newest.take(self.visibility.sees(query.positions, newest.positions)[0])

    def mass(self, query: Contexts, divisor: Float[Tensor, " t"], overlap: int = 0) -> LogMass:
        """Return the mass [s t n] at every size, in order."""
        count, bands = self.visible_count(overlap), []
        # Masses add up: that of a size is that of the smaller size and of the band of entries between them.
        for high, low in pairwise(max(count - size, 0) for size in (0, *self.sizes)):
            if self.contexts is None or low >= high:
                empty = query.g.new_full((len(divisor), len(query.token)), -math.inf)
                bands.append(LogMass(empty, empty))
            else:
                entries = self.contexts.take(slice(low, high))
                bands.append(blockwise_mass(query, entries, self.visibility, divisor, metric=self.metric))
        target, total = (
            torch.stack(masses).logcumsumexp(0) for masses in zip(*((b.target, b.total) for b in bands), strict=True)
        )
        return LogMass(target, total)


def check_sizes(sizes: list[int]) -> list[int]:
    """Return the sizes of a memory as a list; UserError unless they are positive and rising."""
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not sizes:
        raise UserError(f"sizes={shown(sizes)}: it must be a list of numbers of entries, such as [1024]")
    for size in sizes:
        check_number("sizes", size, at_least=1, whole=True)
    if sorted(set(sizes)) != list(sizes):
        raise UserError(f"sizes={list(sizes)} must be rising: set tune.memory_size")
    return list(sizes)
