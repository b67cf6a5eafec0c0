"""Half an hour on a borrowed CUDA device: ``python -m benchmarks.on_device --text DIR`` (make gpu).

Tests, every benchmark, then a training of 7M parameters for each row of the main table, for as long as the time allows. Each
step is a command of its own, and its end is recorded in ``steps.json``: the same command goes on with the next step, and with
the training where it was, also on another device to which outputs/ and benchmarks/results/ have been copied.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.__main__ import NAMES
from benchmarks.measure import RESULTS, ROOT
from trime.common.io import write_atomically
from trime.lab.provenance import commit, hardware
from trime.report.tables import markdown

GPU = RESULTS / "gpu"
LONGEST = 600  # seconds of a step before the trainings
RUNS = {  # whole runs, at size=tiny
    "bfloat16, the default": [],
    "float32": ["trainer.precision=32-true"],
    "faiss-gpu": ["index=ivf", "index.factory=IVF16_SQ8", "index.device=cuda"],
}


class Step(NamedTuple):
    """A command, and whether it may take all the time that is left, since it resumes."""

    name: str
    words: list[str]
    resumes: bool = False


def steps(options: argparse.Namespace) -> list[Step]:
    """Return the steps in their order."""
    python, run = [sys.executable], [sys.executable, "cli.py", "trainer.accelerator=gpu", "logger=none"]
    outputs = f"paths.outputs={options.outputs}"
    benchmark = [*python, "-m", "benchmarks"]
    return [
        Step("tests", [*python, "-m", "pytest", "-q", "-m", "gpu", "tests/test_gpu.py"]),
        *(
            Step(name, [*run, "experiment=trime_ext", "size=tiny", f"{outputs}/gpu-{number}", *words])
            for number, (name, words) in enumerate(RUNS.items())
        ),
        *(Step(name, [*benchmark, name, "--device", "cuda", "--json", str(GPU / f"{name}.json")]) for name in NAMES),
        Step(
            "trainings",
            [
                *(*run, "table=main", "size=paper_7m", "dataset=folder_words", f"dataset.path={options.text}", outputs),
                *(f"train.updates={options.updates}", "evaluate.lines=false", "index=auto", f"report.keep={GPU / 'main'}"),
                *("evaluate.sample=documents", "evaluate.tokens=100k", "datastore.tokens=2M"),  # minutes, not hours
            ],
            resumes=True,
        ),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the steps that are left; return 1 if one of them failed, or if there is no CUDA device."""
    parser = argparse.ArgumentParser("python -m benchmarks.on_device", description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="a folder of novels or other text to train on")
    parser.add_argument("--minutes", type=float, default=30, help="time for all steps together")
    parser.add_argument("--updates", type=int, default=40_000, help="of each training")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs", help="folder of runs")
    options = parser.parse_args(arguments)
    options.text = options.text.resolve()
    if not options.text.is_dir():
        parser.error(f"--text {options.text}: there is no such folder")
    if not torch.cuda.is_available():
        print(without_device())
        return 1
    return run_steps(steps(options), time.monotonic() + 60 * options.minutes, GPU / "steps.json")


def without_device() -> str:
    """Return what to do where there is no CUDA device."""
    return (
        "error: this machine has no CUDA device, which `make gpu` is for: it runs the tests marked gpu, the benchmarks and "
        "trainings there. `make test` runs every Triton kernel in its interpreter, and `make bench` the benchmarks on the CPU."
    )


def run_steps(planned: list[Step], end: float, file: Path) -> int:
    """Run the steps that ``file`` does not record as done at this commit; return 1 if one of them failed."""
    recorded: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    done = recorded["steps"] if recorded.get("commit") == commit() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    for step in planned:
        left = end - time.monotonic()
        if done.get(step.name, {}).get("state") == "done" or left <= 0:
            continue
        print(f"{step.name}: {' '.join(step.words)}", flush=True)
        done[step.name] = run_step(step, left if step.resumes else min(left, LONGEST))
        content = {"commit": commit(), "date": date.today().isoformat(), "hardware": hardware(), "steps": done}
        write_atomically(file, json.dumps(content, indent=1))
    lines = [[step.name, *map(str, done.get(step.name, {"state": "no time left", "seconds": ""}).values())] for step in planned]
    print(markdown(["step", "state", "seconds"], lines))
    return int(any(result["state"] == "failed" for result in done.values()))


def run_step(step: Step, seconds: float) -> dict[str, Any]:
    """Run a step for so many seconds at most; return how it ended and how long it took."""
    started = time.monotonic()
    process = subprocess.Popen(step.words, cwd=ROOT, start_new_session=True)
    try:
        state = "failed" if process.wait(seconds) else "done"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        process.wait()
        state = "to be continued" if step.resumes or seconds < LONGEST else "failed"
    return {"state": state, "seconds": round(time.monotonic() - started)}


if __name__ == "__main__":
    sys.exit(main())
