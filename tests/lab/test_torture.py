"""A sample of each campaign; ``make torture`` runs them whole."""

from __future__ import annotations

import pytest

from scripts.torture import files, kills, names, settings, together
from scripts.torture.outcome import GOOD, Case, summary


def assert_good(cases: list[Case], attempts: int) -> None:
    """Every attempt ended well."""
    assert len(cases) >= attempts, summary(cases)
    assert [case for case in cases if case.outcome not in GOOD] == []


@pytest.mark.slow
def test_malformed_settings() -> None:
    assert len([*settings.every_case()]) >= 2000
    assert_good(settings.campaign(100, 0), 100)


@pytest.mark.slow
def test_damaged_files() -> None:
    assert_good(files.campaign(40, 0, ("ivf",)), 40)


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [names.fifo, names.not_utf8_name, names.strange_names])
def test_hostile_text(hostile: names.Hostile) -> None:
    assert_good([names.prepared(hostile, False)], 1)


@pytest.mark.slow
def test_two_and_four_at_once() -> None:
    assert_good(together.campaign(1, 0), 2)


@pytest.mark.slow
def test_kills() -> None:
    assert_good(kills.campaign(len(kills.COMMANDS), 0), len(kills.COMMANDS))
