"""A memory at test: what every memory of a row answers, whatever it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from trime.types import Contexts, Float, Int, Mass, Tensor


class Window(NamedTuple):
    """All contexts of a window, the first ``context`` of which are not scored; the vocabulary's mass of the others.

    ``asked`` are the tokens whose probability is asked for; null: those that followed.
    """

    contexts: Contexts
    context: int
    vocabulary: Mass
    asked: Int[Tensor, " n"] | None = None

    @property
    def scored(self) -> Contexts:
        """The scored contexts with the tokens that followed them."""
        return self.contexts.take(slice(self.context, None))

    @property
    def query(self) -> Contexts:
        """The scored contexts with the tokens that are asked for."""
        return self.scored if self.asked is None else self.scored._replace(token=self.asked)

    @property
    def scored_from(self) -> int:
        """Where the scored contexts start in their document."""
        return int(self.contexts.place.position[self.context])


class Entries(NamedTuple):
    """What a memory shows to contexts: raw similarities, the tokens that followed, and where the entries stand.

    ``counts``: of a memory with experts of its own, each entry's log-count under each of them; -inf where it has none.
    """

    similarity: Float[Tensor, "*n k"]
    token: Int[Tensor, "*n k"]
    place: Int[Tensor, "*n k"]  # in this text, or the number in a datastore
    counts: Float[Tensor, "*n e k"] | None = None


class Memory(ABC):
    """Answers for windows in stream order. For each: ``evidence`` or ``experts``, then ``write``.

    ``sizes``: the numbers of entries for which it answers at once, the axis s of its masses.
    ``looks_ahead``: it can be asked for many windows at once, for its answer does not depend on what was read before.
    ``fills``: what is read goes into it.
    ``remembers_all``: what it answers depends on the whole document so far, not on its last contexts.
    ``expert_names``: the names of its experts, where it has its own in place of one for each temperature.
    """

    sizes: list[int] = [0]
    looks_ahead = False
    fills = False
    remembers_all = False
    expert_names: list[str] = []

    def reset(self) -> None:  # noqa: B027 (most memories hold nothing of what was read)
        """Forget what was read."""

    def ahead(self, windows: list[Window]) -> list[Any]:
        """Return what ``evidence`` wants to know of each window, where ``looks_ahead``."""
        raise NotImplementedError

    @abstractmethod
    def evidence(self, window: Window, divisor: Float[Tensor, " t"], ahead: Any = None) -> Mass:
        """Return the mass [s t n] of the window's targets, and in all, with similarities over each divisor."""

    def experts(self, window: Window, divisor: Float[Tensor, " t"], ahead: Any = None) -> Mass:
        """Return the mass [s e n] under each of the memory's experts: one for each divisor, unless ``expert_names``."""
        return self.evidence(window, divisor, ahead)

    def write(self, window: Window) -> None:  # noqa: B027
        """Add what a window read, after it was scored."""

    @abstractmethod
    def entries(self, window: Window) -> Entries:
        """Return what the memory shows to the last context of a window, the token of which is not known yet."""

    @property
    def bytes(self) -> int:
        """Return the size of what it holds now, in memory or on disk."""
        return 0
