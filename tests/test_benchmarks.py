"""Every benchmark runs; what it measures is asserted nowhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import memorizing


def test_memorizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"SEGMENT": 64, "WIDTH": 32, "EXACT": 128, "TRAINED": 2, "ASKED": 2}.items():
        monkeypatch.setattr(memorizing, name, value)
    monkeypatch.setattr(sys, "argv", ["memorizing", "--sizes", "128", "256", "--rounds", "1", "--results", str(tmp_path)])
    memorizing.main()
    found = json.loads((tmp_path / "memorizing.json").read_text())
    assert {"command", "date", "commit", "hardware", "versions", "rows"} == found.keys()
    told = [(row["step"], row["memory"], row["search"]) for row in found["rows"]]
    kinds = ((128, "exact"), (256, "approximate"), (256, "faiss"))
    assert told == [(step, *own) for step in ("training", "evaluation") for own in kinds]
    assert all(row["recall"] == 1 if row["search"] == "exact" else 0 < row["recall"] <= 1 for row in found["rows"])
    assert "| training" in capsys.readouterr().out
