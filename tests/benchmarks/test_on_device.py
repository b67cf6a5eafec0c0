"""Half an hour on a borrowed device: its commands are understood, it goes on where it was, and says what it is without one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import on_device
from benchmarks.on_device import Step, main, run_steps, steps
from tests.conftest import composed


def test_its_runs_are_understood(text_folder: Path, tmp_path: Path) -> None:
    options = argparse.Namespace(text=text_folder, updates=7, outputs=tmp_path)
    planned = steps(options)
    assert len({step.name for step in planned}) == len(planned)
    assert [step.name for step in planned if step.resumes] == ["trainings"]
    for step in planned:
        if "cli.py" in step.words:
            config = composed(*step.words[2:])
            assert config.trainer.accelerator == "gpu" and config.paths.outputs.startswith(str(tmp_path))


def test_steps_go_on_where_they_were(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def step(name: str, code: str, resumes: bool = False) -> Step:
        return Step(name, [sys.executable, "-c", code], resumes)

    file, long = tmp_path / "results" / "steps.json", "import time; time.sleep(60)"
    planned = [step("good", "print('good ran')"), step("bad", "raise SystemExit(2)"), step("long", long, resumes=True)]
    assert run_steps(planned, time.monotonic() + 3, file) == 1
    states = {name: result["state"] for name, result in json.loads(file.read_text())["steps"].items()}
    assert states == {"good": "done", "bad": "failed", "long": "to be continued"}
    assert "| long | to be continued |" in capfd.readouterr().out.replace("  ", " ")
    mended = [*planned[:1], step("bad", "print('mended ran')"), step("long", "print('the rest ran')", resumes=True)]
    assert run_steps(mended, time.monotonic() + 60, file) == 0
    out = capfd.readouterr().out
    assert "mended ran" in out and "the rest ran" in out and "good ran\n" not in out


def test_without_a_device_it_says_what_it_is_for(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(on_device, "run_steps", lambda *arguments: pytest.fail("nothing is run"))
    assert main(["--text", str(text_folder)]) == 1
    assert "no CUDA device" in capsys.readouterr().out
