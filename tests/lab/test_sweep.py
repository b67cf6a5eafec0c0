"""A sweep says after each run how long the rest will take; runs that were complete already do not count as fast."""

from __future__ import annotations

import pytest

from trime.lab.sweep import count_runs, duration, forecast

MINUTE = 60.0


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        ([4 * MINUTE], "run 1 of 6 took 4 min: about 20 min more"),
        ([4 * MINUTE, 2 * MINUTE], "run 2 of 6 took 2 min: about 12 min more"),
        ([None], "run 1 of 6 had nothing to make"),
        ([None, 4 * MINUTE], "run 2 of 6 took 4 min: about 16 min more"),
        ([4 * MINUTE, None], "run 2 of 6 had nothing to make: about 16 min more"),
        ([10.0] * 6, "run 6 of 6 took 10 s"),
        ([None] * 6, "run 6 of 6 had nothing to make"),
    ],
)
def test_the_rest_is_forecast_from_runs_that_made_something(seconds: list[float | None], line: str) -> None:
    assert forecast(seconds, 6) == line


def test_durations_are_as_people_say_them() -> None:
    assert [duration(seconds) for seconds in (0.3, 89, 91, 3600, 9000)] == ["0 s", "89 s", "2 min", "60 min", "2.5 h"]


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("experiment=vanilla,trime seed=0,1,2 size=tiny", 6),
        ("index=exact,cells,ivf index.k=8,64 index=exact", 2),
        ("seed=range(4) tune.memory_size=[64,128]", 4),
        ("seed=0", 1),
        ("seed=[", 0),
    ],
)
def test_the_later_choice_of_a_setting_counts_once(words: str, runs: int) -> None:
    """As those on a command line, beside those of a table."""
    assert count_runs(words.split()) == runs
