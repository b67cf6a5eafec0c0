"""Long-term memory at test in which an eviction policy chooses the entries, instead of the last M (see ``fifo``).

Policies score an entry by the attention that it receives: its softmax weight within this memory alone, at τ = 1.
"""

from __future__ import annotations

import torch

from trime.eviction.base import EvictionPolicy
from trime.memory.bounded import BoundedMemory, MemoryState
from trime.memory.fifo import check_sizes
from trime.memory.objective.blockwise import BLOCK, blockwise_mass
from trime.memory.similarity import similarity
from trime.memory.visibility import Everything, SameDocument
from trime.types import AttentionBlock, Contexts, Float, Int, Mass, Tensor, TokenPosition


class EvictingTokenMemory:
    """A separate bounded memory for each of ``sizes``; cleared at the start of a document unless ``crossing``.

    The newest entries wait outside while a window itself contains them as context, unless ``repeats``.
    """

    def __init__(
        self, sizes: list[int], policy: EvictionPolicy, crossing: bool = False, repeats: bool = False, metric: str = "ip"
    ):
        self.sizes, self.crossing, self.repeats, self.metric = check_sizes(sizes), crossing, repeats, metric
        self.memories = [BoundedMemory(size, policy) for size in self.sizes]
        self.visibility = Everything() if crossing else SameDocument()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.states: list[MemoryState] | None = None
        self.waiting: Contexts | None = None
        self.count = 0  # contexts that came before the waiting ones

    @property
    def bytes(self) -> int:
        """Return the size of the largest memory's entries in bytes."""
        return sum(column.nbytes for column in self.states[-1].columns) if self.states else 0

    def write(self, seen: Contexts, overlap: int = 0) -> None:
        """Add the newest entries, oldest first; they are inserted when the next window is read."""
        self.waiting = seen if self.waiting is None else Contexts.concat([self.waiting, seen])

    def prepare(self, query: Contexts, overlap: int) -> None:
        """Insert waiting entries before a query, and forget those of another document."""
        if not self.crossing and self.waiting is not None and (self.waiting.place.document[-1] != query.place.document[0]):
            self.reset()
        self.insert_waiting(query, 0 if self.repeats else overlap)

    def entries(self, query: Contexts, overlap: int = 0) -> Contexts:
        """Return the entries that queries of a document see at the largest size."""
        self.prepare(query, overlap)
        return to_contexts(self.states[-1]) if self.states else query.take(slice(0, 0))

    def evidence(self, query: Contexts, divisor: Float[Tensor, " t"], overlap: int = 0) -> Mass:
        """Return the mass [s t n] at every size, in order; the attention of the queries then updates the policies' scores."""
        self.prepare(query, overlap)
        start = self.count + (0 if self.waiting is None else len(self.waiting.token))
        position = start + torch.arange(len(query.token), device=query.g.device)
        masses = []
        for number, memory in enumerate(self.memories):
            state = self.states[number] if self.states else memory.empty(to_columns(query.take(slice(0, 0))))
            masses.append(blockwise_mass(query, to_contexts(state), self.visibility, divisor, metric=self.metric))
            if self.states and memory.policy.uses_attention:
                self.states[number] = self.observe_attention(memory.policy, state, query, position)
        return Mass(torch.stack([mass.target for mass in masses]), torch.stack([mass.total for mass in masses]))

    def insert_waiting(self, query: Contexts, overlap: int) -> None:
        """Insert the waiting entries but for the ``overlap`` newest."""
        if self.waiting is None or len(self.waiting.token) <= overlap:
            return
        ready = len(self.waiting.token) - overlap
        columns = to_columns(self.waiting.take(slice(0, ready)))
        position = self.count + torch.arange(ready, device=query.g.device)
        before = self.states or [memory.empty(columns) for memory in self.memories]
        pairs = zip(self.memories, before, strict=True)
        self.states = [memory.update(state, columns, position[None]) for memory, state in pairs]
        self.waiting, self.count = self.waiting.take(slice(ready, None)), self.count + ready

    def observe_attention(
        self, policy: EvictionPolicy, state: MemoryState, query: Contexts, position: Int[Tensor, " n"]
    ) -> MemoryState:
        """Return the state after the attention of a window's queries, whose positions count all contexts read so far."""
        place, filled = TokenPosition(*(column[0] for column in state.columns[2:])), state.ranking.position[0] >= 0
        summary = policy.begin(state.ranking)
        for rows in torch.arange(len(position), device=position.device).split(BLOCK):
            seen = self.visibility.sees(query.place.take(rows), place) & filled
            score = similarity(query.g[rows], state.columns[0][0].to(query.g), self.metric) / query.g.shape[1] ** 0.5
            mass = score.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, -torch.inf)
            summary = policy.observe(summary, AttentionBlock(mass[None, None], position[rows][None]))
        return state._replace(ranking=policy.finalize(state.ranking, summary))


def to_columns(seen: Contexts) -> tuple[Tensor, ...]:
    """Return contexts as the columns of a memory with one row."""
    return tuple(column[None] for column in (seen.g, seen.token, *seen.place))


def to_contexts(state: MemoryState) -> Contexts:
    """Return the entries of a memory with one row, in no particular order."""
    filled = state.ranking.position[0] >= 0
    g, token, *place = (column[0][filled] for column in state.columns)
    return Contexts(g, token, TokenPosition(*place))
