"""The interface of memories at test, and the windows of text that they are queried with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from trime.types import Contexts, Float, Int, LogMass, Tensor


class Window(NamedTuple):
    """The contexts of a window, of which the first ``num_context`` are not scored, and the vocabulary's mass for the others.

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
    def scored_from(self) -> int:
        """Return the position in the document of the first scored context."""
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
    """What of the text read so far the next window is scored with, in rising order."""

    NOTHING = 0  # each window is scored by itself
    DOCUMENT = 1
    TEXT = 2  # earlier documents too


class Memory(ABC):
    """A memory at test. Windows come in stream order; each is queried, then passed to ``write``.

    ``mass``, ``experts`` and ``entries`` do not change the memory; ``write`` does.

    ``sizes``: the numbers of entries that one query evaluates, which are the axis s of masses.
    ``supports_batched_queries``: True: many windows can be queried in one call of ``prefetch``, because results do not
    depend on what was written.
    ``carries``: what of the text that is read is written to the memory, and stays.
    ``depends_on_whole_document``: masses depend on the whole document so far, not only on its last contexts.
    ``expert_names``: the names of the memory's experts; empty: there is one expert for each temperature.
    """

    sizes: list[int] = [0]
    supports_batched_queries = False
    state_scope = StateScope.NONE
    depends_on_whole_document = False
    expert_names: list[str] = []

    def reset(self) -> None:  # noqa: B027 (most memories store nothing of the text)
        """Forget the text that was read."""

    def prefetch(self, windows: list[Window]) -> list[Any]:
        """Return for each window what ``mass`` takes as ``prefetched``; only where ``supports_batched_queries``."""
        raise NotImplementedError

    def request(self, windows: list[Window]) -> Callable[[], list[Any]]:
        """Return what returns ``prefetch`` of these windows; where other processes search, they begin now."""
        return partial(self.prefetch, windows)

    @abstractmethod
    def mass(self, window: Window, divisor: Float[Tensor, " t"], prefetched: Any = None) -> LogMass:
        """Return the masses [s t n] for the window's queries, with similarities divided by each divisor."""

    def experts(self, window: Window, divisor: Float[Tensor, " t"], prefetched: Any = None) -> LogMass:
        """Return the masses [s e n] under each expert of the memory: one for each divisor, or those of ``expert_names``."""
        return self.mass(window, divisor, prefetched)

    def write(self, window: Window) -> None:  # noqa: B027
        """Add the scored contexts of a window, after it was scored."""

    @abstractmethod
    def entries(self, window: Window) -> Entries:
        """Return the entries that the last context of a window sees; its own token is not known yet."""

    @property
    def bytes(self) -> int:
        """Return the current size of the memory in bytes, in RAM or on disk."""
        return 0
