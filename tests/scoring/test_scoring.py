"""A mixture of memories outside the pipeline; windows are scored in order, while the search for the next ones goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import trime
from trime.common.types import LogMass, Tensor
from trime.scoring import scorer
from trime.scoring.mixture_spec import MixtureSpec
from trime.scoring.scorer import Scorer
from trime.token_memory.test.base import Entries, Memory, Window


def windows() -> Iterator[trime.Window]:
    draw = torch.Generator().manual_seed(0)
    for document in range(6):
        for start in (0, 10, 20):
            g, logits = torch.randn(10, 8, generator=draw), torch.randn(10, 20, generator=draw)
            yield trime.window_of(g, logits, torch.randint(0, 20, (10,), generator=draw), document, start)


def test_memories_may_have_different_sizes() -> None:
    memories = {"near": trime.LongMemory([16], trime.FIFO()), "far": trime.LongMemory([8], trime.LRU(trime.OwnPosition()))}
    mixture = trime.MemoryMixture({**memories}, trime.Adaptive([1.0], epochs=2), folds=3)
    assert mixture.fit(windows()) > 0
    for log_probability, parts in mixture.explain(windows()):
        assert {*parts} == {"vocabulary", "near", "far"}
        torch.testing.assert_close(torch.stack([*parts.values()]).sum(0).float(), log_probability.exp().float())


def test_passes_share_no_state() -> None:
    """Two passes at a time, one that is given up, and another mixture with the same memory and the same Adaptive."""
    long, adaptive = trime.LongMemory([16], trime.FIFO()), trime.Adaptive([1.0], epochs=2)
    one = trime.MemoryMixture({"long": long}, adaptive, folds=3)
    one.fit(windows())
    alone = torch.cat([*one.score(windows())])
    other = trime.MemoryMixture({"long": long, "local": trime.LocalMemory()}, adaptive, folds=3)
    given_up = one.score(windows())
    next(given_up)
    other.fit(windows())
    together = zip(one.score(windows()), one.explain(windows()), other.score(windows()), one.score(windows()), strict=True)
    passes = [torch.cat(parts) for parts in zip(*((a, b, d) for a, (b, _), _, d in together), strict=True)]
    assert all(torch.equal(scores, alone) for scores in passes)
    assert torch.equal(torch.cat([*given_up]), alone[10:])


def test_a_document_may_have_any_number() -> None:
    mixture = trime.MemoryMixture({"local": trime.LocalMemory()}, trime.Adaptive([1.0], epochs=2), folds=3)
    g, logits, targets = torch.randn(9, 8), torch.randn(9, 20), torch.arange(9)
    assert mixture.fit([trime.window_of(g, logits, targets, document=-1)]) > 0


class Elsewhere(Memory):
    """A memory that is searched by others; it notes what happens to it."""

    supports_batched_queries = True

    def __init__(self) -> None:
        self.events: list[str] = []

    def request(self, windows: list[Window]) -> Callable[[], list[Any]]:
        names = [str(int(window.contexts.token[0])) for window in windows]
        self.events.append(f"ask {' '.join(names)}")
        return lambda: self.events.append(f"wait {' '.join(names)}") or names  # type: ignore[func-returns-value]

    def mass(self, window: Window, divisor: Tensor, prefetched: Any = None) -> LogMass:
        self.events.append(f"use {prefetched}")
        return LogMass(*(torch.zeros(1, len(divisor), len(window.query.token)) for _ in range(2)))

    def entries(self, window: Window) -> Entries:
        raise NotImplementedError


def window(number: int) -> Window:
    """Return a window of two tokens, which are its number."""
    return trime.window_of(torch.zeros(2, 3), torch.zeros(2, 9), torch.full((2,), number), start=2 * number)


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_the_next_windows_are_searched_while_these_are_scored(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "PREFETCHED_QUERIES", 4)  # two windows
    memory = Elsewhere()
    scored = Scorer([MixtureSpec(("elsewhere",), ())], {"elsewhere": memory}, False).query(map(window, range(count)))
    assert [int(read.contexts.token[0]) for read, _ in scored] == [*range(count)]
    expected = {
        0: [],
        1: ["ask 0", "wait 0", "use 0"],
        4: ["ask 0 1", "ask 2 3", "wait 0 1", "use 0", "use 1", "wait 2 3", "use 2", "use 3"],
        5: [*("ask 0 1", "ask 2 3", "wait 0 1", "use 0", "use 1"), *("ask 4", "wait 2 3", "use 2", "use 3", "wait 4", "use 4")],
    }
    assert memory.events == expected[count]
