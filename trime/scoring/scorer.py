"""Score encoded windows with memories, one window at a time: the pass of the stages tune and evaluate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from trime.common.types import Float, LogMass, Tensor
from trime.scoring.mixture_spec import FittedMixtureSpec, FittedScorer, GridScorer, MixtureSpec, scales
from trime.token_memory.test.base import Memory, Window

Item = TypeVar("Item")

PREFETCHED_QUERIES = 4096  # minimum number of queries in a call of ``prefetch``, but for the last one


class ScoredWindow(NamedTuple):
    """A window that the only row of a scorer has read, with log P of each scored token."""

    window: Window
    masses: dict[str, LogMass]
    log_probability: Float[Tensor, " n"]
    scorer: GridScorer | FittedScorer

    def contributions(self) -> dict[str, Float[Tensor, " n"]]:
        """Return the contributions to each probability, by source; call it before the next window is read."""
        return self.scorer.contributions(self.window, self.masses)

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
        for memory in self.memories.values():
            memory.reset()
        expected = 0
        for window, prefetched in self.with_prefetched(windows):
            if self.reset_on_gap and window.scored_from != expected:
                for memory in self.memories.values():
                    memory.reset()
            expected = window.scored_from + len(window.query.token)
            yield window, self.row_masses(window, prefetched)
            for memory in self.memories.values():  # only now: a window must not see itself
                memory.write(window)

    def with_prefetched(self, windows: Iterator[Window]) -> Iterator[tuple[Window, dict[str, Any]]]:
        """Yield each window with the results of memories that can be queried for many windows at once."""
        queried = {name: memory for name, memory in self.memories.items() if memory.supports_batched_queries}
        # A memory that must see each window before the next leaves groups of one window.
        groups = group_windows(windows, PREFETCHED_QUERIES if queried else 1)
        requested = ((group, {name: memory.request(group) for name, memory in queried.items()}) for group in groups)
        # The next group is requested before this one is waited for: other processes search meanwhile.
        for group, requests in prefetch_one(requested):
            results = {name: wait() for name, wait in requests.items()}
            for number, window in enumerate(group):
                yield window, {name: result[number] for name, result in results.items()}

    def row_masses(self, window: Window, prefetched: dict[str, Any]) -> list[dict[str, LogMass]]:
        """Return the masses of each row's memories, at the row's divisors and memory sizes."""
        joint_scale, interpolation_scale = scales(window.contexts.g.shape[1], self.scaled_interpolation)
        divisors = [row.divisors(joint_scale, interpolation_scale) for row in self.rows]
        device = window.contexts.g.device
        # A memory is asked once for all rows, under every divisor of any of them (and once for its own experts).
        distinct = torch.tensor(sorted({value for values in divisors for value in values}), device=device)
        results: list[dict[str, LogMass]] = [{} for _ in self.rows]
        for name, memory in self.memories.items():
            arguments, answers = (window, distinct, prefetched.get(name)), dict[bool, LogMass]()
            for row, own, result in zip(self.rows, divisors, results, strict=True):
                if name not in row.memories:
                    continue
                by_expert = row.uses_experts and bool(memory.expert_names)
                if by_expert not in answers:
                    answers[by_expert] = memory.experts(*arguments) if by_expert else memory.mass(*arguments)
                mass = answers[by_expert]
                if memory.sizes != Memory.sizes:
                    # A fitted row has the single size of its memories, whose number no mixture knows.
                    sizes = [0 if row.uses_experts and len(memory.sizes) == 1 else memory.sizes.index(s) for s in row.sizes]
                    mass = LogMass(mass.target[sizes], mass.total[sizes])
                if not by_expert:
                    index = torch.searchsorted(distinct, torch.tensor(own, device=device))
                    mass = LogMass(mass.target[:, index], mass.total[:, index])
                result[name] = mass
        return results


def memory_names(rows: Sequence[MixtureSpec | FittedMixtureSpec]) -> set[str]:
    return set().union(*(row.memories for row in rows))


def prefetch_one(items: Iterator[Item]) -> Iterator[Item]:
    """Yield each item once the one after it has been made."""
    waiting: list[Item] = []
    for item in items:
        yield from waiting
        waiting = [item]
    yield from waiting


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
