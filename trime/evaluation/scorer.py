"""Score encoded windows with memories, one window at a time: the pass of the stages tune and evaluate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from trime.evaluation.fitted_mixture_spec import FittedMixtureSpec, FittedScorer
from trime.evaluation.mixture_spec import GridScorer, MixtureSpec, scales
from trime.memory.base import Memory, Window
from trime.types import Float, LogMass, Tensor

Item = TypeVar("Item")

PREFETCHED_QUERIES = 4096  # minimum number of queries in a call of ``prefetch``, but for the last one


class WindowMasses(NamedTuple):
    """The masses of a window by memory: under every divisor, and under the memory's own experts where it has any."""

    by_divisor: dict[str, LogMass]
    experts: dict[str, LogMass]


class ScoredWindow(NamedTuple):
    """A window that the only row of a scorer has read, with log P of each scored token."""

    window: Window
    masses: dict[str, LogMass]
    log_probability: Float[Tensor, " n"]
    scorer: GridScorer | FittedScorer

    def parts(self) -> dict[str, Float[Tensor, " n"]]:
        """Return how much of each probability is the vocabulary's and each memory's; call it before the next window is read."""
        return self.scorer.parts(self.window, self.masses)

    def weights(self) -> dict[str, Float[Tensor, " n"]]:
        """Return the weight of the vocabulary and of each memory, if there are any; call it before the next window is read."""
        return self.scorer.weights(self.masses)


class Scorer:
    """Queries every memory for each window and scores every row from the answers.

    ``reset_on_gap`` is the published code's quirk: memories are cleared where a window does not follow the previous one.
    """

    def __init__(
        self,
        rows: Sequence[MixtureSpec | FittedMixtureSpec],
        memories: Mapping[str, Memory],
        scaled_interpolation: bool,
        reset_on_gap: bool = False,
    ):
        self.rows, self.memories = rows, {name: memories[name] for name in memories if name in memory_names(rows)}
        self.scaled_interpolation, self.reset_on_gap = scaled_interpolation, reset_on_gap

    def score_rows(self, windows: Iterator[Window]) -> Iterator[tuple[Window, list[Float[Tensor, "s a n"]]]]:
        """Yield each window in stream order with log P(target) of each row over its grid."""
        scorers = [row.window_scorer() for row in self.rows]
        for window, masses in self.query(windows):
            yield window, [scorer(window, row_masses) for scorer, row_masses in zip(scorers, masses, strict=True)]

    def score_row(self, windows: Iterator[Window]) -> Iterator[ScoredWindow]:
        """Yield each window in stream order as the only row scores it."""
        (row,) = self.rows
        scorer = row.window_scorer()
        for window, (masses,) in self.query(windows):
            yield ScoredWindow(window, masses, scorer(window, masses)[0, 0], scorer)

    def query(self, windows: Iterator[Window]) -> Iterator[tuple[Window, list[dict[str, LogMass]]]]:
        """Yield each window in stream order with the masses [s t n] of each row's memories."""
        self.reset()
        expected = 0
        for window, prefetched in self.with_prefetched(windows):
            if self.reset_on_gap and window.scored_from != expected:
                self.reset()
            expected = window.scored_from + len(window.query.token)
            divisors = self.divisors(window.contexts.g.shape[1])
            distinct = torch.tensor(sorted({value for values in divisors for value in values}), device=window.contexts.g.device)
            masses = self.query_memories(window, distinct, prefetched)
            yield window, [self.row_masses(masses, row, distinct, own) for row, own in zip(self.rows, divisors, strict=True)]
            for memory in self.memories.values():
                memory.write(window)

    def reset(self) -> None:
        """Reset all memories."""
        for memory in self.memories.values():
            memory.reset()

    def divisors(self, width: int) -> list[list[float]]:
        """Return each row's divisors of raw similarities, for keys of a width."""
        return [row.divisors(*scales(width, self.scaled_interpolation)) for row in self.rows]

    def with_prefetched(self, windows: Iterator[Window]) -> Iterator[tuple[Window, dict[str, Any]]]:
        """Yield each window with the results of memories that can be queried for many windows at once.

        The next windows are requested before the results of these are waited for, so that other processes search meanwhile.
        """
        queried = {name: memory for name, memory in self.memories.items() if memory.supports_batched_queries}
        groups = group_windows(windows, PREFETCHED_QUERIES if queried else 1)
        requested = ((group, {name: memory.request(group) for name, memory in queried.items()}) for group in groups)
        for group, requests in prefetch_one(requested):
            results = {name: wait() for name, wait in requests.items()}
            for number, window in enumerate(group):
                yield window, {name: result[number] for name, result in results.items()}

    def query_memories(self, window: Window, divisors: Float[Tensor, " t"], prefetched: dict[str, Any]) -> WindowMasses:
        """Query each memory for a window, under every divisor or under its own experts, as the rows need."""
        result = WindowMasses({}, {})
        for name, memory in self.memories.items():
            arguments = window, divisors, prefetched.get(name)
            if any(name in row.memories and row.uses_experts for row in self.rows) and memory.expert_names:
                result.experts[name] = memory.experts(*arguments)
            if any(name in row.memories and not (row.uses_experts and memory.expert_names) for row in self.rows):
                result.by_divisor[name] = memory.mass(*arguments)
        return result

    def row_masses(
        self, masses: WindowMasses, row: MixtureSpec | FittedMixtureSpec, distinct: Tensor, divisors: list[float]
    ) -> dict[str, LogMass]:
        """Select the masses of a row's memories at the row's divisors and memory sizes, in the row's order."""
        index = torch.searchsorted(distinct, torch.tensor(divisors, device=distinct.device))
        result = {}
        for name in row.memories:
            memory, has_experts = self.memories[name], row.uses_experts and bool(self.memories[name].expert_names)
            mass = masses.experts[name] if has_experts else masses.by_divisor[name]
            if memory.sizes != Memory.sizes:
                sizes = [0 if row.uses_experts and len(memory.sizes) == 1 else memory.sizes.index(size) for size in row.sizes]
                mass = LogMass(mass.target[sizes], mass.total[sizes])
            result[name] = mass if has_experts else LogMass(mass.target[:, index], mass.total[:, index])
        return result


def memory_names(rows: Sequence[MixtureSpec | FittedMixtureSpec]) -> set[str]:
    """Return the names of all memories of some rows."""
    return set().union(*(row.memories for row in rows))


def prefetch_one(items: Iterator[Item]) -> Iterator[Item]:
    """Yield each item once the one after it has been made."""
    made: list[Item] = []
    for item in items:
        yield from made
        made = [item]
    yield from made


def group_windows(windows: Iterator[Window], queries: int) -> Iterator[list[Window]]:
    """Yield lists of consecutive windows with at least ``queries`` scored contexts in all; the last may have fewer."""
    group: list[Window] = []
    count = 0
    for window in windows:
        group.append(window)
        count += len(window.vocabulary.total)
        if count >= queries:
            yield group
            group, count = [], 0
    if group:
        yield group
