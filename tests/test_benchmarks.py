"""Every benchmark runs; what it measures is asserted nowhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import memorizing


def test_memorizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(memorizing, "SEGMENT", 64)
    monkeypatch.setattr(memorizing, "WIDTH", 32)
    monkeypatch.setattr(sys, "argv", ["memorizing", "--sizes", "128", "--rounds", "1", "--results", str(tmp_path)])
    memorizing.main()
    found = json.loads((tmp_path / "memorizing.json").read_text())
    assert {"command", "date", "commit", "hardware", "versions", "rows"} == found.keys()
    assert [row["step"] for row in found["rows"]] == ["training", "evaluation"]
    assert "| training" in capsys.readouterr().out
