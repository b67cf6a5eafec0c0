"""Minutes on a borrowed CUDA device: ``python -m benchmarks.on_device --text DIR`` (make gpu).

A list of steps, the most wanted first, each at most three minutes: tests, benchmarks that never ran there, a training of 7M
parameters for each row of the main table, a decoder's reading of long texts. A step is a command of its own, and its end is
recorded in ``steps.json``: the same command goes on with the next step, and with a training where it was, also on another
device to which outputs/ and benchmarks/results/ have been copied. ``--again NAME`` repeats a step, ``--list`` shows all.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import RESULTS, ROOT
from trime.common.io import write_atomically
from trime.lab.provenance import commit, hardware
from trime.report.tables import markdown

GPU = RESULTS / "gpu"
LONGEST = 180  # seconds of a step
LEAST = 15  # seconds that must be left for a step to begin
WANTED = ("external", "datastore", "attendre", "mixture", "objective", "step", "memorizing", "cache", "recall")  # benchmarks
RUNS = {  # whole runs, at size=tiny
    "bfloat16, the default": [],
    "float32": ["trainer.precision=32-true"],
    "faiss-gpu": ["index=ivf", "index.factory=IVF16_SQ8", "index.device=cuda"],
}
SHORT = ["train.updates=500", "stages=[prepare,pack,fit]"]  # metrics.csv has its speed by update, beside that of the row
ROWS = ("vanilla", "trime", "trime_ext", "trime_long", "knn_lm", "cache", "knn_lm_cache", "trime_ext_no_long", "trime_all")


class Step(NamedTuple):
    """A command, and whether it goes on where it was when it is called again."""

    name: str
    words: list[str]
    resumes: bool = False


def steps(options: argparse.Namespace) -> list[Step]:
    """Return the steps in their order; those that read a decoder only if there is one."""
    python, outputs = [sys.executable], f"paths.outputs={options.outputs}"
    run = [*python, "cli.py", f"trainer.accelerator={options.accelerator}", "logger=none"]
    device, kept = "cuda" if options.accelerator == "gpu" else "cpu", options.record.parent
    training = [
        *(f"size={options.size}", "dataset=folder_words", f"dataset.path={options.text}", outputs),
        *(f"train.updates={options.updates}", "evaluate.lines=false", "index=auto", "evaluate.sample=documents"),
        *("evaluate.tokens=100k", "datastore.tokens=2M", *options.set),  # minutes, not hours
    ]
    finished = f"report.runs=[{','.join(f'{options.outputs}/runs/{name}/**' for name in ROWS)}]"
    reading = ["table=passkey", f"model.name={options.model}", f"questions.background={options.text}", outputs]
    duel = ["--model", str(options.model), "--tokens", "4096", "--prompts", "50", "--folder", f"{options.outputs}/duel"]
    planned = [
        Step("tests", [*python, "-m", "pytest", "-q", "-m", "gpu", "tests/test_gpu.py"]),
        *(
            Step(f"run: {name}", [*run, "experiment=trime_ext", "size=tiny", f"{outputs}/gpu-{number}", *words])
            for number, (name, words) in enumerate(RUNS.items())
        ),
        *(benchmark(name, device, kept) for name in WANTED[:4]),
        *(Step(f"row: {name}", [*run, f"experiment={name}", *training], resumes=True) for name in ROWS),
        Step("trime, compiled", [*run, "experiment=trime", *training, "trainer.compile=true", *SHORT], resumes=True),
        Step("rows, compared", [*run, "stages=[report]", finished, f"report.keep={kept / 'main'}", outputs]),
        *(benchmark(name, device, kept) for name in WANTED[4:]),
    ]
    if options.model:
        planned += [
            Step("reading: numbers in novels", [*run, *reading, f"report.keep={kept / 'passkey'}"], resumes=True),
            benchmark("duel", device, kept, *duel),
        ]
    return planned


def benchmark(name: str, device: str, kept: Path, *words: str) -> Step:
    """Return the step of a benchmark, whose results go into the folder ``kept``."""
    command = [sys.executable, "-m", "benchmarks", name, "--device", device, "--json", str(kept / f"{name}.json"), *words]
    return Step(f"benchmark: {name}", command, resumes=name == "duel")


def main(arguments: list[str] | None = None) -> int:
    """Run the steps that are left; return 1 if one of them failed, or if there is no CUDA device."""
    parser = argparse.ArgumentParser("python -m benchmarks.on_device", description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="a folder of novels or other text to train on")
    parser.add_argument("--model", type=Path, help="a folder of a decoder and its tokenizer, for steps that read")
    parser.add_argument("--minutes", type=float, default=12, help="time for all steps together")
    parser.add_argument("--updates", type=int, default=5000, help="of each training")
    parser.add_argument("--size", default="paper_7m", help="of the trained models, a file of conf/size")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the trainings")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs", help="folder of runs")
    parser.add_argument(
        "--record", type=Path, default=GPU / "steps.json", help="where the ends of steps are recorded, with results beside it"
    )
    parser.add_argument("--again", nargs="*", default=[], help="names of steps that are done, and run once more")
    parser.add_argument("--list", action="store_true", help="only print the steps")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu", help="cpu: to try the steps out")
    options = parser.parse_args(arguments)
    options.text = options.text.resolve()
    if not options.text.is_dir():
        parser.error(f"--text {options.text}: there is no such folder")
    planned = steps(options)
    if unknown := [name for name in options.again if name not in {step.name for step in planned}]:
        parser.error(f"--again {unknown[0]}: choose from {', '.join(step.name for step in planned)}")
    if options.list:
        print("\n".join(f"{step.name}: {shlex.join(step.words)}" for step in planned))
        return 0
    if options.accelerator == "gpu" and not torch.cuda.is_available():
        print(without_device())
        return 1
    return run_steps(planned, time.monotonic() + 60 * options.minutes, options.record, options.again)


def without_device() -> str:
    """Return what to do where there is no CUDA device."""
    return (
        "error: this machine has no CUDA device, which `make gpu` is for: it runs the tests marked gpu, the benchmarks and "
        "trainings there. `make test` runs every Triton kernel in its interpreter, and `make bench` the benchmarks on the CPU."
    )


def run_steps(planned: list[Step], end: float, file: Path, again: list[str] | None = None) -> int:
    """Run the steps that ``file`` does not record as done, but for those ``again``; return 1 if one of them failed.

    A step that resumes is called again as long as there is time, each time for three minutes at most.
    """
    ends: dict[str, Any] = json.loads(file.read_text())["steps"] if file.exists() else {}
    ends = {name: result for name, result in ends.items() if name not in (again or [])}
    file.parent.mkdir(parents=True, exist_ok=True)
    for step in planned:
        while ends.get(step.name, {}).get("state") != "done" and (left := end - time.monotonic()) >= LEAST:
            print(f"{step.name}: {shlex.join(step.words)}", flush=True)
            ends[step.name] = run_step(step, min(left, LONGEST), ends.get(step.name, {}).get("seconds", 0))
            content = {"commit": commit(), "date": date.today().isoformat(), "hardware": hardware(), "steps": ends}
            write_atomically(file, json.dumps(content, indent=1))
            if ends[step.name]["state"] == "failed":
                break
    waiting = {"state": "no time left", "seconds": ""}
    lines = [[step.name, *(str(ends.get(step.name, waiting)[key]) for key in waiting)] for step in planned]
    print(markdown(["step", "state", "seconds"], lines))
    return int(any(result["state"] == "failed" for result in ends.values()))


def run_step(step: Step, seconds: float, before: int) -> dict[str, Any]:
    """Run a step for so many seconds at most; return how it ended and how long it took, with the seconds ``before``."""
    started = time.monotonic()
    process = subprocess.Popen(step.words, cwd=ROOT, start_new_session=True)
    try:
        state = "failed" if process.wait(seconds) else "done"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        process.wait()
        state = "to be continued" if step.resumes or seconds < LONGEST else "failed"
    took = before * step.resumes + round(time.monotonic() - started)
    return {"state": state, "seconds": took, "commit": commit(), "date": date.today().isoformat(), "gpu": hardware()["gpu"]}


if __name__ == "__main__":
    sys.exit(main())
