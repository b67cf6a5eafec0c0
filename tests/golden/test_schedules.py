"""Learning rates by update number, as the published schedulers give them (misc/lr.json)."""

from __future__ import annotations

import pytest

from tests.golden.commands import schedule
from tests.golden.published import index, parametrized

CASES = index("misc/lr.json")


@parametrized("name", list(CASES))
def test_learning_rates(name: str) -> None:
    rate = schedule(CASES[name]["args"].split())
    found = [rate(update) for update in CASES[name]["updates"]]
    assert found == pytest.approx(CASES[name]["lr"], rel=1e-9, abs=1e-15)
