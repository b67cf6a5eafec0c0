"""Runs whose text, artefacts and results lie at URLs: another machine finds them, and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

import trime
from trime.errors import UserError
from trime.places import COPIES, Place, fetch_once
from trime.plan.language_model import Plan
from trime.run.runner import run


def test_another_machine_finds_a_run(
    tiny: Callable[..., DictConfig],
    tmp_path: Path,
    text_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It copies what it needs, lists and compares the runs, and opens one by its URL."""
    disk = f"file://{tmp_path}/disk"
    words = "experiment=trime_ext", "dataset=folder", f"dataset.path=file://{text_folder}", f"paths.outputs={disk}/outputs"
    words = *words, f"paths.data={disk}/data", "index.factory=null", "index.k=16"
    monkeypatch.setenv(COPIES, str(tmp_path / "first"))
    config = tiny(*words)
    loss = run(config).loss
    folder = (Place(f"{disk}/outputs/runs") / config.name / Plan(config).run_folder.name).address
    results = Path(folder.removeprefix("file://")) / "results.json"
    assert loss == json.loads(results.read_text())["metrics"]["valid"][-1]["loss"]
    assert not [*(tmp_path / "disk").rglob("part-*")] and not [*(tmp_path / "disk").rglob("*.partial")]
    monkeypatch.setenv(COPIES, str(tmp_path / "second"))
    fetch_once.cache_clear()
    capsys.readouterr()
    run(tiny("stages=[list]", *words))
    assert "1 runs in file://" in capsys.readouterr().out
    assert not [*(tmp_path / "second").rglob("*.safetensors")], "a list needs the results alone"
    run(tiny("stages=[report]", f"report.runs={disk}/outputs/runs/**", *words))
    assert [*(tmp_path / "disk" / "outputs" / "reports").glob("*/table.md")]
    capsys.readouterr()
    assert run(tiny(*words)).loss == loss
    said = capsys.readouterr().out
    assert "made" not in said and f"fit: found {disk}/outputs/artefacts/fit-" in said
    score = trime.load(folder).score("the cat sat on a mat")
    assert score


def test_a_storage_that_refuses_is_told_before_anything_is_made(tiny: Callable[..., DictConfig]) -> None:
    with pytest.raises(UserError, match="file:///dev/null/x: the storage refused or did not answer"):
        run(tiny("experiment=trime", "paths.outputs=file:///dev/null/x"))
    with pytest.raises(UserError, match="need a shared disk"):
        run(tiny("experiment=trime", "paths.outputs=memory://x", "trainer.num_nodes=2"))
