"""Every benchmark runs; what it measures is asserted nowhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import attendre, memorizing


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


def test_attendre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for name, value in {"WIDTH": 16, "CHUNK": 16, "TOP_K": 8, "SIZE": 32, "LONGEST": 64}.items():
        monkeypatch.setattr(attendre, name, value)
    sizes = ["--lengths", "64", "128", "--queries", "16", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["attendre", *sizes, "--results", str(tmp_path)])
    attendre.main()
    rows = json.loads((tmp_path / "attendre.json").read_text())["rows"]
    ways = {
        "read, fifo",
        "read, lra_sum",
        "read, everything kept",
        "read, full attention",
        "both ways, flush",
        "both ways, drain",
    }
    assert {row["what"] for row in rows} == ways and len(rows) == 10 and all(row["tokens/s"] > 0 for row in rows)
