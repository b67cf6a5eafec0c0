"""The external memory at test: the K nearest entries of a datastore (TRIME Eq. 4, 7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trime.common.checks import check_number, check_object
from trime.common.types import Contexts, Float, LogMass, Tensor
from trime.token_memory.search.datastore import KNNMemory, retrieved_mass
from trime.token_memory.test.base import Entries, Memory, Window


class ExternalMemory(Memory):
    """The nearest entries of a datastore, searched for many windows at once; ``size``: bytes of the datastore and its index."""

    supports_batched_queries = is_searched = True
    nearest: KNNMemory

    def __init__(self, nearest: KNNMemory, size: int = 0):
        check_object("nearest", nearest, KNNMemory, "KNNMemory(store)")
        check_number("size", size, at_least=0, whole=True)
        self.nearest, self.size, self.metric = nearest, size, nearest.metric

    def __deepcopy__(self, memo: dict[int, Any]) -> ExternalMemory:
        """Return a memory of the same datastore: gigabytes that no text changes."""
        return ExternalMemory(self.nearest, self.size)

    @property
    def bytes(self) -> int:
        return self.size

    def prefetch(self, windows: list[Window]) -> list[Any]:
        """Return the scores and tokens of the entries nearest to each window's contexts."""
        return self.request(windows)()

    def request(self, windows: list[Window]) -> Callable[[], list[Any]]:
        queries = [window.query for window in windows]
        wait, sizes = self.nearest.request(Contexts.concat(queries)), [len(query.token) for query in queries]

        def result() -> list[Any]:
            score, token, _ = wait()
            return list(zip(score.split(sizes), token.split(sizes), strict=True))

        return result

    def mass(self, window: Window, divisor: Float[Tensor, " t"], prefetched: Any = None) -> LogMass:
        score, token = self.prefetch([window])[0] if prefetched is None else prefetched
        mass = retrieved_mass(score, token, window.query.token, divisor)
        return LogMass(mass.target[None], mass.total[None])

    def entries(self, window: Window) -> Entries:
        score, token, number = self.nearest.entries(window.contexts.take(slice(-1, None)))
        return Entries(score[0], token[0], number[0].to(token.device))
