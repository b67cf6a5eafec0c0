"""Learning rates by update number, as the published schedulers give them (misc/lr.json)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.golden.published import index, parametrized
from trime.optim.schedules import Cosine, InverseSquareRoot

CASES = index("misc/lr.json")


def schedule(words: list[str]) -> Callable[[int], float]:
    """The schedule of a published command line; there --lr is the cosine's minimum, --max-lr its peak."""

    def option(name: str, default: float) -> float:
        return float(words[words.index(name) + 1]) if name in words else default

    warmup, low = int(option("--warmup-updates", 0)), option("--lr", 0)
    if "cosine" not in words:
        return InverseSquareRoot(low, warmup, option("--warmup-init-lr", 0))
    return Cosine(
        option("--max-lr", 0),
        int(option("--max-update", 0)),
        low,
        warmup,
        option("--warmup-init-lr", low),
        int(option("--lr-period-updates", 0)) or None,
        option("--t-mult", 1),
        option("--lr-shrink", 0.1),
    )


@parametrized("name", list(CASES))
def test_learning_rates(name: str) -> None:
    rate = schedule(CASES[name]["args"].split())
    found = [rate(update) for update in CASES[name]["updates"]]
    assert found == pytest.approx(CASES[name]["lr"], rel=1e-9, abs=1e-15)
