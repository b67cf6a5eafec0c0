"""The interface of memories at test, and the windows of text that they are queried with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar, NamedTuple

from trime.common.types import Contexts, Float, Int, LogMass, Tensor
from trime.memory.retrieval.datastore import KNNMemory
from trime.memory.slots.eviction.base import EvictionPolicy


class Window(NamedTuple):
    """The contexts of a window, the first ``num_context`` of them not scored, and the vocabulary's mass for the others.

    ``targets``: the tokens whose probability is computed; None: those that followed.
    """

    contexts: Contexts
    num_context: int
    vocabulary: LogMass
    targets: Int[Tensor, " n"] | None = None

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
    """The entries of a memory that contexts see: raw similarities, the tokens that followed, and where they are from.

    ``counts``: for a memory with named experts, the log-count of each entry under each expert, -inf where there is none.
    """

    similarity: Float[Tensor, "*n k"]
    token: Int[Tensor, "*n k"]
    source: Int[Tensor, "*n k"]  # position in this text, or number in the datastore
    counts: Float[Tensor, "*n e k"] | None = None


class StateScope(IntEnum):
    """How far a memory's state reaches, in rising order."""

    NONE = 0  # each window is scored by itself
    DOCUMENT = 1
    CORPUS = 2  # earlier documents too


class MemoryTraits:
    """The properties of a memory at test that a run needs before the memory is opened.

    ``state_scope``: how far the text reaches that is written to the memory, and stays.
    ``metric``: how entries are compared with a query; None where they are counted instead. Memories that share a softmax must
    have the same.
    ``needs_text_order``: windows must come in the order of the text, so that compatibility.sorted_windows is refused.
    ``is_searched``: entries are found by searching a datastore; the opened memory has ``nearest``.
    """

    state_scope = StateScope.NONE
    metric: str | None = None
    needs_text_order: ClassVar[bool] = False
    is_searched: ClassVar[bool] = False


class Memory(MemoryTraits, ABC):
    """A memory at test. Windows come in stream order; each is queried, then passed to ``write``.

    ``mass``, ``experts`` and ``entries`` do not change the memory; ``write`` does.

    ``sizes``: the numbers of entries that one query evaluates, which are the axis s of masses. A memory whose size is tuned
    takes them as an argument, and its yaml sets it: ``sizes: ${tune.memory_size}``.
    ``supports_batched_queries``: True: many windows can be queried in one call of ``prefetch``, because results do not
    depend on the text that was written.
    ``depends_on_whole_document``: masses depend on the whole document so far, not only on its last contexts.
    ``expert_names``: the names of the memory's experts; empty: there is one expert for each temperature.
    ``nearest``: the search of a datastore, whose recall, entries and text are reported; None where nothing is searched.
    """

    sizes: list[int] = [0]
    supports_batched_queries = False
    depends_on_whole_document = False
    expert_names: list[str] = []
    nearest: KNNMemory | None = None

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


class ReplayableMemory(Memory):
    """A memory that an eviction policy bounds, and over which stages=[replay] tries other policies and sizes."""

    @abstractmethod
    def with_policy(self, policy: EvictionPolicy, sizes: list[int]) -> ReplayableMemory:
        """Return an empty memory of the same settings under another policy, at each of some sizes."""

    @abstractmethod
    def attention(self, window: Window, earlier: Float[Tensor, "m d"]) -> Float[Tensor, " m"]:
        """Return the attention mass that a window's queries give all earlier contexts of the text in an unlimited memory."""

    @abstractmethod
    def retained_positions(self, window: Window) -> list[Int[Tensor, " _"]]:
        """Return the positions, counted in contexts written, of the entries that a window sees at each size."""
