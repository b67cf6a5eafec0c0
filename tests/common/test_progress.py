"""Progress bars where output goes to a file."""

from __future__ import annotations

import pytest

from trime.common import progress
from trime.common.progress import Progress


def test_work_that_ends_soon_writes_nothing_to_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total=3, desc="short") as bar:
        for _ in range(3):
            bar.update()
    assert capsys.readouterr().err == ""


def test_each_state_in_a_file_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "IN_FILE", 0)
    with Progress(total=3, desc="long") as bar:
        for _ in range(3):
            bar.update()
    lines = [line for line in capsys.readouterr().err.split("\n") if line]
    assert lines and all(line.startswith("long") for line in lines) and "3/3" in lines[-1]
    assert not any("\r" in line for line in lines)
