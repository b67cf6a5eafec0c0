"""How soon the command line answers, and where the time of preparing a text and of evaluating goes.

A text of drawn words is prepared; then TRIME with all its memories, hardly trained, is encoded, tuned and evaluated. For both
the three functions are named that take most time themselves, with their shares.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import ROOT, Claim, Measured, alternately, composed
from benchmarks.packing import drawn
from trime.run.runner import run

COMMANDS = {
    "--help": ["--help"],
    "an unknown key": ["train.updats=3"],
    "an unknown experiment": ["experiment=trime_extern"],
}
SOON = 1.5  # seconds
MANY = 100_000_000  # tokens, of WikiText-103


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=3_000_000, help="that are prepared")
    parser.add_argument("--scored", type=int, default=20_000, help="tokens of valid and of test that are evaluated")
    parser.add_argument("--keys", type=int, default=200_000, help="of the external memory")
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Measured:
    """Commands in turn; then the two profiles."""
    commands = {name: partial(answered, words) for name, words in COMMANDS.items()}
    found = alternately(commands, options.rounds, warmup=1)
    rows: list[dict[str, Any]] = [{"what": name, "seconds": own["median_seconds"]} for name, own in found.items()]
    with TemporaryDirectory() as place:
        rows += profiles(Path(place), options)
    return Measured(
        rows, [Claim(f"seconds until {name} is answered", own["median_seconds"], SOON) for name, own in found.items()]
    )


def answered(words: list[str]) -> None:
    """One command, in a process of its own."""
    subprocess.run([sys.executable, "cli.py", *words], cwd=ROOT, capture_output=True, check=False)


def profiles(place: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Preparing, and evaluating."""
    text = place / "text"
    for split, share in (("train", 1.0), ("valid", 0.1), ("test", 0.1)):
        (text / split).mkdir(parents=True)
        words = drawn(int(options.tokens * share), 100).reshape(-1, 100)
        for number, part in enumerate(range(0, len(words), 500)):
            lines = "\n".join(" ".join(f"w{word}" for word in line) for line in words[part : part + 500])
            (text / split / f"{number:05d}.txt").write_text(lines)
    given = [
        *("experiment=trime_ext", "size=small", "train.updates=1", "logger=none", "dataset=folder"),
        *(f"dataset.path={text}", f"paths.data={place}/data", f"paths.outputs={place}/outputs"),
        *(f"evaluate.tokens={options.scored}", f"datastore.tokens={options.keys}", "trainer.enable_progress_bar=false"),
        f"trainer.accelerator={'cpu' if options.device == 'cpu' else 'gpu'}",
    ]

    def stages(names: str) -> Callable[[], Any]:
        config = composed([*given, f"stages=[{names}]"])
        return lambda: run(config)

    prepared, costs = profiled(stages("prepare"))
    rows = [row(f"prepare {options.tokens:,} tokens", prepared, costs)]
    rows[0]["seconds at 100M tokens"] = round(prepared * MANY / options.tokens / 1.2)
    stages("pack,fit")()
    rows.append(
        row(f"evaluate {options.scored:,} tokens, {options.keys:,} keys", *profiled(stages("encode,datastore,tune,evaluate")))
    )
    return rows


def row(what: str, seconds: float, costs: list[str]) -> dict[str, Any]:
    return {"what": what, "seconds": round(seconds, 2), "largest costs": "; ".join(costs)}


def profiled(work: Callable[[], Any]) -> tuple[float, list[str]]:
    """Seconds, and the three functions that take most themselves."""
    profile, start = cProfile.Profile(), time.perf_counter()
    profile.runcall(work)
    seconds = time.perf_counter() - start
    table = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    largest = sorted(table.items(), key=lambda item: -item[1][2])[:3]
    total = sum(own[2] for own in table.values())
    return seconds, [f"{named(*function)} {own[2] / total:.0%}" for function, own in largest]


def named(file: str, line: int, function: str) -> str:
    """A function as a reader finds it."""
    place = Path(file)
    return f"{place.relative_to(ROOT)}:{function}" if place.is_relative_to(ROOT) else function
