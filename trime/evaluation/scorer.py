"""Scores encoded windows with memories, a window at a time: the pass that tune and evaluate make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from trime.evaluation.fitted_rows import FittedRow
from trime.evaluation.rows import Row, scales
from trime.memory.base import Memory, Window
from trime.types import Float, Mass, Tensor

AHEAD = 4096  # queries at least that a memory is asked at once, where it can be


class Found(NamedTuple):
    """What memories know of a window: of each, the mass under every divisor, and under its own experts if it has such."""

    evidence: dict[str, Mass]
    experts: dict[str, Mass]


class Scorer:
    """Evidence of every memory for a window, and every row's score from it.

    ``jumps_clear`` is the published code's quirk: memories are lost where a window does not follow the last.
    """

    def __init__(
        self,
        rows: Sequence[Row | FittedRow],
        memories: Mapping[str, Memory],
        scaled_interpolation: bool,
        jumps_clear: bool = False,
    ):
        self.rows, self.memories = rows, {name: memories[name] for name in memories if name in names_of(rows)}
        self.scaled_interpolation, self.jumps_clear = scaled_interpolation, jumps_clear

    def scores(self, windows: Iterator[Window]) -> Iterator[tuple[Window, list[Float[Tensor, "s a n"]]]]:
        """For each window in stream order, log P(target) of each row over its grid."""
        readings = [row.reading() for row in self.rows]
        for window, masses in self.masses(windows):
            yield window, [reading(window, own) for reading, own in zip(readings, masses, strict=True)]

    def masses(self, windows: Iterator[Window]) -> Iterator[tuple[Window, list[dict[str, Mass]]]]:
        """For each window in stream order, what each row is told of its memories: masses [s t n]."""
        self.reset()
        expected = 0
        for window, ahead in self.looked_ahead(windows):
            if self.jumps_clear and window.scored_from != expected:
                self.reset()
            expected = window.scored_from + len(window.query.token)
            divisors = self.divisors(window.contexts.g.shape[1])
            every = torch.tensor(sorted({divisor for own in divisors for divisor in own}), device=window.contexts.g.device)
            found = self.found(window, every, ahead)
            yield window, [self.chosen(found, row, every, own) for row, own in zip(self.rows, divisors, strict=True)]
            for memory in self.memories.values():
                memory.write(window)

    def reset(self) -> None:
        """Forget what was read."""
        for memory in self.memories.values():
            memory.reset()

    def divisors(self, width: int) -> list[list[float]]:
        return [row.divisors(*scales(width, self.scaled_interpolation)) for row in self.rows]

    def looked_ahead(self, windows: Iterator[Window]) -> Iterator[tuple[Window, dict[str, Any]]]:
        """Each window with what memories found that can be asked for many windows at once."""
        asked = {name: memory for name, memory in self.memories.items() if memory.looks_ahead}
        for group in grouped(windows, AHEAD if asked else 1):
            found = {name: memory.ahead(group) for name, memory in asked.items()}
            yield from ((window, {name: own[number] for name, own in found.items()}) for number, window in enumerate(group))

    def found(self, window: Window, every: Float[Tensor, " t"], ahead: dict[str, Any]) -> Found:
        """What each memory says of a window."""
        result = Found({}, {})
        for name, memory in self.memories.items():
            given = window, every, ahead.get(name)
            if any(name in row.memories and row.asks_experts for row in self.rows) and memory.own_experts:
                result.experts[name] = memory.experts(*given)
            if any(name in row.memories and not (row.asks_experts and memory.own_experts) for row in self.rows):
                result.evidence[name] = memory.evidence(*given)
        return result

    def chosen(self, found: Found, row: Row | FittedRow, every: Tensor, divisors: list[float]) -> dict[str, Mass]:
        """The masses of the row's memories at its own divisors and memory sizes, in the row's order."""
        index = torch.searchsorted(every, torch.tensor(divisors, device=every.device))
        result = {}
        for name in row.memories:
            memory, own = self.memories[name], row.asks_experts and bool(self.memories[name].own_experts)
            mass = found.experts[name] if own else found.evidence[name]
            if memory.sizes != Memory.sizes:
                sizes = [memory.sizes.index(size) for size in row.sizes]
                mass = Mass(mass.target[sizes], mass.total[sizes])
            result[name] = mass if own else Mass(mass.target[:, index], mass.total[:, index])
        return result


def names_of(rows: Sequence[Row | FittedRow]) -> set[str]:
    """The memories that some row names."""
    return set().union(*(row.memories for row in rows))


def grouped(windows: Iterator[Window], queries: int) -> Iterator[list[Window]]:
    """Windows of so many queries together, or of one more."""
    group: list[Window] = []
    held = 0
    for window in windows:
        group.append(window)
        held += len(window.vocabulary.total)
        if held >= queries:
            yield group
            group, held = [], 0
    if group:
        yield group
