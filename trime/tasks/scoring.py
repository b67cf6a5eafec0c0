"""Scores encoded windows with memories, a window at a time: the pass that tune and evaluate make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from trime.memory.blockwise import blockwise_mass
from trime.memory.datastore import Nearest, mass_of
from trime.memory.recent import Recent
from trime.memory.selective import Selective
from trime.memory.visibility import Local
from trime.tasks.rows import Row, scales
from trime.types import Contexts, Float, Int, Mass, Tensor

AHEAD = 4096  # queries at least that the external memory is asked at once


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


class Scorer:
    """Evidence of every memory for a window, and every row's score from it.

    ``jumps_clear`` is the published code's quirk: the long memory is lost where a window does not follow the last.
    """

    def __init__(
        self,
        rows: list[Row],
        recent: Recent | Selective | None,
        nearest: Nearest | None,
        scaled_interpolation: bool,
        jumps_clear: bool = False,
        metric: str = "ip",
    ):
        self.rows, self.recent, self.nearest = rows, recent, nearest
        self.scaled_interpolation, self.jumps_clear, self.metric = scaled_interpolation, jumps_clear, metric

    def scores(self, windows: Iterator[Window]) -> Iterator[tuple[Window, list[Float[Tensor, "s a n"]]]]:
        """For each window in stream order, log P(target) of each row over its grid."""
        if self.recent is not None:
            self.recent.reset()
        expected = 0
        for window, entries in self.searched(windows):
            if self.recent is not None and self.jumps_clear and window.scored_from != expected:
                self.recent.reset()
            expected = window.scored_from + len(window.query.token)
            divisors = self.divisors(window.contexts.g.shape[1])
            every = torch.tensor(sorted({divisor for own in divisors for divisor in own}), device=window.contexts.g.device)
            found = self.evidence(window, every, entries) if len(every) else {}
            yield (
                window,
                [
                    row.score(window.vocabulary, self.chosen(found, row, every, own))
                    for row, own in zip(self.rows, divisors, strict=True)
                ],
            )
            if self.recent is not None:
                self.recent.write(window.scored, overlap=len(window.contexts.token))

    def divisors(self, width: int) -> list[list[float]]:
        return [row.divisors(*scales(width, self.scaled_interpolation)) for row in self.rows]

    @property
    def names(self) -> set[str]:
        """The memories that some row names."""
        return set().union(*(row.memories for row in self.rows))

    def searched(self, windows: Iterator[Window]) -> Iterator[tuple[Window, tuple[Tensor, Tensor] | None]]:
        """Each window with the scores and tokens of its nearest entries, which do not depend on what was read before."""
        if self.nearest is None or "external" not in self.names:
            yield from ((window, None) for window in windows)
            return
        for group in grouped(windows, AHEAD):
            queries = [window.query for window in group]
            score, token, _ = self.nearest.entries(Contexts.joined(queries))
            sizes = [len(query.token) for query in queries]
            yield from zip(group, zip(score.split(sizes), token.split(sizes), strict=True), strict=True)

    def evidence(self, window: Window, divisor: Float[Tensor, " t"], entries: tuple[Tensor, Tensor] | None) -> dict[str, Mass]:
        """Mass [s t n] of each memory that some row names."""
        query, names = window.query, self.names
        found = {}
        if "local" in names:
            found["local"] = blockwise_mass(query, window.contexts, Local(), divisor, metric=self.metric)
        if entries is not None:
            found["external"] = mass_of(*entries, query.token, divisor)
        result = {name: Mass(mass.target[None], mass.total[None]) for name, mass in found.items()}
        if "long" in names and self.recent is not None:
            result["long"] = self.recent.evidence(query, divisor, overlap=window.context)
        return result

    def chosen(self, found: dict[str, Mass], row: Row, every: Tensor, divisors: list[float]) -> dict[str, Mass]:
        """The masses of the row's memories at its own divisors and memory sizes, in the row's order."""
        index = torch.searchsorted(every, torch.tensor(divisors, device=every.device))
        held = self.recent.sizes if self.recent is not None else []
        sizes = [held.index(size) for size in row.sizes] if "long" in row.memories else []
        result = {}
        for name in row.memories:
            mass = found[name]
            if name == "long":
                mass = Mass(mass.target[sizes], mass.total[sizes])
            result[name] = Mass(mass.target[:, index], mass.total[:, index])
        return result


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
