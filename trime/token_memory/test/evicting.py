"""Long-term memory at test in which an eviction policy chooses the entries, instead of the last M (see ``fifo``).

Policies score an entry by the attention that it receives: its softmax weight within just this memory, at τ = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from trime.common.checks import check_number, short_repr
from trime.common.types import AttentionBlock, Contexts, Float, Int, LogMass, Tensor, TokenPosition
from trime.errors import UserError
from trime.kv.bounded import BoundedMemory, MemoryState
from trime.kv.eviction.base import EvictionPolicy
from trime.token_memory.similarity import similarity
from trime.token_memory.train.objective.blockwise import BLOCK, blockwise_mass
from trime.token_memory.train.visibility import Everything, SameDocument


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
        raise UserError(f"sizes={short_repr(sizes)}: it must be a list of numbers of entries, such as [1024]")
    for size in sizes:
        check_number("sizes", size, at_least=1, whole=True)
    if sorted(set(sizes)) != list(sizes):
        raise UserError(f"sizes={list(sizes)} must be rising: set tune.memory_size")
    return list(sizes)


class EvictingTokenMemory:
    """A separate bounded memory for each of ``sizes``; cleared at the start of a document unless ``across_documents``.

    The newest entries wait outside while a window itself contains them as context, unless ``include_window``.
    """

    def __init__(
        self,
        sizes: list[int],
        policy: EvictionPolicy,
        across_documents: bool = False,
        include_window: bool = False,
        metric: str = "ip",
    ):
        self.sizes, self.metric = check_sizes(sizes), metric
        self.across_documents, self.include_window = across_documents, include_window
        self.memories = [BoundedMemory(size, policy) for size in self.sizes]
        self.visibility = Everything() if across_documents else SameDocument()
        self.reset()

    def reset(self) -> None:
        self.content = Content(None, None, 0)
        self.cached: tuple[int, Content] | None = None  # number of inserted entries and content, as computed last

    @property
    def bytes(self) -> int:
        """Return the size of the largest memory's entries in bytes."""
        states = self.content.states
        return sum(column.nbytes for column in states[-1].columns) if states else 0

    def write(self, contexts: Contexts, overlap: int = 0) -> None:
        """Update the policies' scores by the attention of a window's contexts, then add the contexts, oldest first."""
        # Contexts wait until they leave the window, which sees them already: they are inserted before the next one is read.
        states, waiting, inserted = self.content_for(contexts, overlap)
        start = inserted + (0 if waiting is None else len(waiting.token))
        position = start + torch.arange(len(contexts.token), device=contexts.g.device)
        if states:
            pairs = zip(self.memories, states, strict=True)
            states = [self.observe_attention(memory.policy, state, contexts, position) for memory, state in pairs]
        self.content = Content(states, contexts if waiting is None else Contexts.concat([waiting, contexts]), inserted)
        self.cached = None

    def entries(self, query: Contexts, overlap: int = 0) -> Contexts:
        """Return the entries that queries of a document see at the largest size."""
        states = self.content_for(query, overlap).states
        return to_contexts(states[-1]) if states else query.take(slice(0, 0))

    def mass(self, query: Contexts, divisor: Float[Tensor, " t"], overlap: int = 0) -> LogMass:
        """Return the mass [s t n] at every size, in order."""
        empty = [memory.empty(to_columns(query.take(slice(0, 0)))) for memory in self.memories]
        states = self.content_for(query, overlap).states or empty
        masses = [blockwise_mass(query, to_contexts(state), self.visibility, divisor, metric=self.metric) for state in states]
        return LogMass(torch.stack([mass.target for mass in masses]), torch.stack([mass.total for mass in masses]))

    def content_for(self, query: Contexts, overlap: int) -> Content:
        """Return the content that a query sees: nothing of another document, and the waiting entries that it may see."""
        states, waiting, inserted = self.content
        if waiting is None:
            return self.content
        if not self.across_documents and waiting.positions.document[-1] != query.positions.document[0]:
            return Content(None, None, 0)
        ready = len(waiting.token) - (0 if self.include_window else overlap)
        if ready > 0 and (self.cached is None or self.cached[0] != ready):
            # Every memory of one window asks with the same overlap: the entries are inserted once, not for each question.
            columns = to_columns(waiting.take(slice(0, ready)))
            position = inserted + torch.arange(ready, device=waiting.g.device)[None]
            pairs = zip(self.memories, states or [memory.empty(columns) for memory in self.memories], strict=True)
            updated = [memory.update(state, columns, position) for memory, state in pairs]
            self.cached = ready, Content(updated, waiting.take(slice(ready, None)), inserted + ready)
        return self.content if ready <= 0 or self.cached is None else self.cached[1]

    def observe_attention(
        self, policy: EvictionPolicy, state: MemoryState, query: Contexts, position: Int[Tensor, " n"]
    ) -> MemoryState:
        """Return the state after the attention of a window's queries, whose positions count all contexts read so far."""
        if not policy.uses_attention:
            return state
        positions, filled = TokenPosition(*(column[0] for column in state.columns[2:])), state.ranking.position[0] >= 0
        summary = policy.begin(state.ranking)
        for rows in torch.arange(len(position), device=position.device).split(BLOCK):
            visible = self.visibility.sees(query.positions.take(rows), positions) & filled
            score = similarity(query.g[rows], state.columns[0][0].to(query.g), self.metric) / query.g.shape[1] ** 0.5
            mass = score.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, -torch.inf)
            summary = policy.observe(summary, AttentionBlock(mass[None, None], position[rows][None]))
        return state._replace(ranking=policy.finalize(state.ranking, summary))


class Content(NamedTuple):
    """The state of the memory of each size, the contexts that are still to be inserted, and how many were inserted in all."""

    states: list[MemoryState] | None
    waiting: Contexts | None
    inserted: int


def to_columns(contexts: Contexts) -> tuple[Tensor, ...]:
    """Return contexts as the columns of a memory with one row."""
    return tuple(column[None] for column in (contexts.g, contexts.token, *contexts.positions))


def to_contexts(state: MemoryState) -> Contexts:
    """Return the entries of a memory with one row, in no particular order."""
    filled = state.ranking.position[0] >= 0
    g, token, *positions = (column[0][filled] for column in state.columns)
    return Contexts(g, token, TokenPosition(*positions))
