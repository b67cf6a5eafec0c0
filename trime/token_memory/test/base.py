"""The interface of memories at test, and the windows of text that they are queried with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar, NamedTuple

from trime.common.types import Contexts, Float, Int, LogMass, Tensor
from trime.token_memory.search.datastore import KNNMemory


class Window(NamedTuple):
    """The contexts of a window, the first ``num_context`` of them not scored, and the vocabulary's mass for the others."""

    contexts: Contexts
    num_context: int
    vocabulary: LogMass
    targets: Int[Tensor, " n"] | None = None  # the tokens whose probability is computed; None: those that followed

    @property
    def scored(self) -> Contexts:
        """Return the scored contexts with the tokens that followed them."""
        return self.contexts.take(slice(self.num_context, None))

    @property
    def query(self) -> Contexts:
        """Return the scored contexts with the tokens whose probability is computed."""
        return self.scored if self.targets is None else self.scored._replace(token=self.targets)

    @property
    def scored_from(self) -> int:  # position in the document
        return int(self.contexts.positions.position[self.num_context])


class Entries(NamedTuple):
    """The entries of a memory that contexts see: raw similarities, the tokens that followed, and where they are from."""

    similarity: Float[Tensor, "*n k"]
    token: Int[Tensor, "*n k"]
    source: Int[Tensor, "*n k"]  # position in this text, or number in the datastore
    counts: Float[Tensor, "*n e k"] | None = None  # log-count under each expert of a memory that names its experts


class StateScope(IntEnum):
    """The reach of a memory's state, in rising order."""

    NONE = 0  # each window is scored by itself
    DOCUMENT = 1
    CORPUS = 2  # earlier documents too


class MemoryTraits:
    """The properties of a memory at test that a run needs before the memory is opened."""

    state_scope = StateScope.NONE  # of the text that is written to the memory, and stays
    metric: str | None = None  # None: entries are counted; memories that share a softmax have the same
    needs_text_order: ClassVar[bool] = False  # compatibility.sorted_windows is refused
    is_searched: ClassVar[bool] = False  # in a datastore; the opened memory has ``nearest``


class Memory(MemoryTraits, ABC):
    """A memory at test. Windows come in stream order; each is queried, then passed to ``write``; no other method changes it."""

    # The numbers of entries that one query evaluates: the axis s of masses. A memory whose size is tuned takes them as an
    # argument, and its yaml sets it: ``sizes: ${tune.memory_size}``.
    sizes: list[int] = [0]
    supports_batched_queries = False  # results do not depend on the text that was written: ``prefetch`` takes many windows
    depends_on_whole_document = False  # on all of it so far, not only on its last contexts
    expert_names: list[str] = []  # empty: there is one expert for each temperature
    nearest: KNNMemory | None = None  # the search of a datastore, whose recall, entries and text are reported

    def reset(self) -> None:
        """Forget the text that was read."""

    def prefetch(self, windows: list[Window]) -> list[Any]:
        """Return for each window the value that ``mass`` takes as ``prefetched``; only where ``supports_batched_queries``."""
        raise NotImplementedError

    def request(self, windows: list[Window]) -> Callable[[], list[Any]]:
        """Start ``prefetch`` of these windows, where other processes search; return a function that waits for its result."""
        return partial(self.prefetch, windows)

    @abstractmethod
    def mass(self, window: Window, divisor: Float[Tensor, " t"], prefetched: Any = None) -> LogMass:
        """Return the masses [s t n] for the window's queries, with similarities divided by each divisor."""

    def experts(self, window: Window, divisor: Float[Tensor, " t"], prefetched: Any = None) -> LogMass:
        """Return the masses [s e n] under each expert of the memory: one for each divisor, or those of ``expert_names``."""
        return self.mass(window, divisor, prefetched)

    def write(self, window: Window) -> None:
        """Add the scored contexts of a window, after it was scored."""

    @abstractmethod
    def entries(self, window: Window) -> Entries:
        """Return the entries that the last context of a window sees; its own token is not known yet."""

    @property
    def bytes(self) -> int:
        """Return the current size of the memory in bytes, in RAM or on disk."""
        return 0
