"""Windows are scored in order, while the search for the next ones goes on elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trime.common.types import Contexts, LogMass, Tensor, TokenPosition
from trime.memory.inference.base import Entries, Memory, Window
from trime.scoring import scorer
from trime.scoring.mixture_spec import MixtureSpec
from trime.scoring.scorer import Scorer


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


def window(number: int, size: int = 2) -> Window:
    """Return a window whose tokens are its number."""
    token = torch.full((size,), number)
    positions = TokenPosition(torch.zeros(size).long(), token, torch.arange(size) + size * number)
    return Window(Contexts(torch.zeros(size, 3), token, positions), 0, LogMass(torch.zeros(size), torch.zeros(size)))


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
        5: [
            *("ask 0 1", "ask 2 3", "wait 0 1", "use 0", "use 1"),
            *("ask 4", "wait 2 3", "use 2", "use 3", "wait 4", "use 4"),
        ],
    }
    assert memory.events == expected[count]
