"""Long-term memory at test: the last M contexts before the window (TRIME section 4.2; Grave et al. 2017)."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from trime.memory.objective.blockwise import blockwise_mass
from trime.memory.visibility import Everything, SameDocument
from trime.types import Contexts, Float, Mass, Tensor


class FifoTokenMemory:
    """First in, first out: holds the ``max(sizes)`` last contexts written, and answers for every size at once.

    ``crossing`` shows entries of earlier documents too (the published way). The ``overlap`` newest
    entries, those which the window holds itself as context, are passed over unless ``repeats`` (the
    published way counts them twice): sizes count from there.
    """

    def __init__(self, sizes: list[int], crossing: bool = False, repeats: bool = False, metric: str = "ip"):
        self.sizes, self.repeats, self.metric = check_sizes(sizes), repeats, metric
        self.visibility = Everything() if crossing else SameDocument()
        self.seen: Contexts | None = None

    def reset(self) -> None:
        """Forgets everything."""
        self.seen = None

    def write(self, seen: Contexts, overlap: int = 0) -> None:
        """Adds the newest entries, oldest first; keeps ``overlap`` more than the largest size."""
        joined = seen if self.seen is None else Contexts.concat([self.seen, seen])
        self.seen = joined.take(slice(max(0, len(joined.token) - self.sizes[-1] - overlap), None))

    @property
    def bytes(self) -> int:
        """Return the size of all entries."""
        return 0 if self.seen is None else self.seen.bytes

    def visible_count(self, overlap: int) -> int:
        """How many entries a window sees that holds the ``overlap`` newest itself."""
        return 0 if self.seen is None else max(0, len(self.seen.token) - (0 if self.repeats else overlap))

    def entries(self, query: Contexts, overlap: int = 0) -> Contexts:
        """Those that queries of a document see at the largest size."""
        if self.seen is None:
            return query.take(slice(0, 0))
        visible_count = self.visible_count(overlap)
        found = self.seen.take(slice(max(0, visible_count - self.sizes[-1]), visible_count))
        return found.take(self.visibility.sees(query.place, found.place)[0])

    def evidence(self, query: Contexts, divisor: Float[Tensor, " t"], overlap: int = 0) -> Mass:
        """Mass [s t n] at every size, in order."""
        visible_count = self.visible_count(overlap)
        edges = [max(visible_count - size, 0) for size in (0, *self.sizes)]
        bands = [self.band(query, divisor, low, high) for high, low in pairwise(edges)]
        return Mass(
            torch.stack([band.target for band in bands]).logcumsumexp(0),
            torch.stack([band.total for band in bands]).logcumsumexp(0),
        )

    def band(self, query: Contexts, divisor: Tensor, low: int, high: int) -> Mass:
        """Mass of the entries low to high, oldest first."""
        if self.seen is None or low >= high:
            nothing = query.g.new_full((len(divisor), len(query.token)), -math.inf)
            return Mass(nothing, nothing)
        return blockwise_mass(query, self.seen.take(slice(low, high)), self.visibility, divisor, metric=self.metric)


def check_sizes(sizes: list[int]) -> list[int]:
    """Sizes of a memory; ValueError unless they are positive and rising."""
    if not sizes or sorted(set(sizes)) != list(sizes) or sizes[0] < 1:
        raise ValueError(f"sizes={list(sizes)} must be positive and rising: mend tune.memory_size")
    return list(sizes)
