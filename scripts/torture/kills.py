"""Commands killed at random moments, some twice in a row, then run to their end: the results are those of an unbroken run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.torture.outcome import Case
from scripts.torture.together import MODULES, SECONDS, comparable, start

KILLS = 20  # by default
COMMANDS = {
    "single run": ("experiment=trime_ext", MODULES),
    "sweep": ("-m", "experiment=vanilla,trime", MODULES),
    "table": ("table=main", "hydra.sweeper.params.experiment='vanilla,knn_lm'", MODULES),
    "datastore": ("experiment=knn_lm", "index=ivf", MODULES),
    "translation": ("experiment=trime_mt",),
    "stateful": ("experiment=trime_memorizing", MODULES),
}


def campaign(count: int | None, seed: int, commands: tuple[str, ...] = tuple(COMMANDS)) -> list[Case]:
    """Kill ``count`` commands, kind after kind."""
    draw, whole = random.Random(seed), {}
    cases = []
    for number in range(count or KILLS):
        name = commands[number % len(commands)]
        if name not in whole:
            with tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                finish(start(Path(folder), *COMMANDS[name]))
                whole[name] = results_below(Path(folder)), time.monotonic() - began
        cases.append(one_kill(name, number, *whole[name], draw))
    return cases


def one_kill(name: str, number: int, expected: str, seconds: float, draw: random.Random) -> Case:
    """Kill a command once or twice, let the same command finish, and compare its results."""
    with tempfile.TemporaryDirectory() as folder:
        moments = [draw.uniform(0.1, seconds) for _ in range(draw.choice((1, 1, 2)))]
        for moment in moments:
            process = start(Path(folder), *COMMANDS[name])
            try:
                process.communicate(timeout=moment)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.communicate()
        what = f"{name} {number}, killed after {', '.join(f'{moment:.1f}' for moment in moments)} s"
        process = start(Path(folder), *COMMANDS[name])
        output, _ = process.communicate(timeout=SECONDS)
        if process.returncode or "Traceback" in output:
            return Case(what, "traceback" if "Traceback" in output else "wrong", output[-300:])
        found = results_below(Path(folder))
        if found == expected:
            return Case(what, "same")
        place = next((place for place, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), len(found))
        return Case(what, "wrong", f"other results: {found[max(0, place - 100) : place + 50]}")


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a command that must succeed."""
    output, _ = process.communicate(timeout=SECONDS)
    if process.returncode:
        sys.exit(output[-2000:])


def results_below(folder: Path) -> str:
    """Return everything comparable in the results below a folder."""
    files = sorted(folder.rglob("results.json"))
    return json.dumps([comparable(file) for file in files], sort_keys=True)
