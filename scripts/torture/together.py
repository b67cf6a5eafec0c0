"""The same command started several times at once, at random offsets: all end well, with the same results."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.torture.outcome import Case

ROOT = Path(__file__).parents[2]
COMMAND, SMALL = (sys.executable, "cli.py"), ("size=tiny", "train.updates=3")
MODULES = "dataset.modules=20"  # of the built-in corpus
SPREAD = 6.0  # seconds over which the starts are spread
VOLATILE = ("command", "checksum", "artefacts", "hardware", "subsets")  # folders, and what is chosen by time
MEASURED = ("seconds", "_per_second", "_per_token", "_mb", "created", "durations")  # how keys end
SECONDS = 900
ROUNDS = 20  # by default


def campaign(count: int | None, seed: int, processes: tuple[int, ...] = (2, 4)) -> list[Case]:
    """Start 2 and 4 processes ``count`` times."""
    draw = random.Random(seed)
    return [one_round(number, size, draw) for number in range(count or ROUNDS) for size in processes]


def one_round(number: int, size: int, draw: random.Random) -> Case:
    """Start processes at random offsets in an empty folder, and compare what they report."""
    what = f"round {number}, {size} processes"
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for wait in sorted(draw.uniform(0, SPREAD) for _ in range(size)):
            time.sleep(wait / size)
            running.append(start(Path(folder), "experiment=trime_ext", MODULES))
        for process in running:
            output, _ = process.communicate(timeout=SECONDS)
            if process.returncode or "Traceback" in output:
                return Case(what, "wrong", output[-300:])
        left = [*Path(folder).rglob("*.partial")]
        results = [*Path(folder).rglob("results.json")]
        good = len(results) == 1 and not left
        return Case(what, "same" if good else "wrong", f"{len(results)} results, left behind: {left}")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a command with its artefacts in a folder."""
    command = [*COMMAND, *words, *SMALL, f"paths.data={folder}/data", f"paths.outputs={folder}/outputs"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **out)  # type: ignore[call-overload, no-any-return]


def comparable(file: Path) -> Any:
    """Return the results that do not depend on time and place."""
    results = json.loads(file.read_text())
    return without_measurements({key: value for key, value in results.items() if key not in VOLATILE})


def without_measurements(content: Any) -> Any:
    """Return content without times, speeds and sizes of processes, at any depth."""
    if isinstance(content, list):
        return [without_measurements(item) for item in content]
    if not isinstance(content, dict):
        return content
    return {key: without_measurements(value) for key, value in content.items() if not key.endswith(MEASURED)}
