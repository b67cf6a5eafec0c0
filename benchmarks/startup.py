"""Response time of the command line, and profiles of preparing a text and of evaluating.

A text of sampled words is prepared; then TRIME with all its memories, barely trained, is encoded, tuned and evaluated. The
three functions with the largest own time in each are named, with their shares.
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

from benchmarks.measure import ROOT, Claim, Measured, alternately
from benchmarks.packing import sample_words
from trime.config.compose import compose_config
from trime.lab.runner import run

COMMANDS = {
    "--help": ["--help"],
    "an unknown key": ["train.updats=3"],
    "an unknown experiment": ["experiment=trime_extern"],
}
BOUND = 1.5  # seconds
WIKITEXT103 = 100_000_000  # tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=3_000_000, help="tokens that are prepared")
    parser.add_argument("--scored", type=int, default=20_000, help="tokens of valid and of test that are evaluated")
    parser.add_argument("--keys", type=int, default=200_000, help="entries of the external memory")
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Measured:
    """Measure the commands in turns, then the two profiles."""
    commands = {name: partial(run_command, words) for name, words in COMMANDS.items()}
    results = alternately(commands, options.rounds, warmup=1)
    rows: list[dict[str, Any]] = [{"what": name, "seconds": result["median_seconds"]} for name, result in results.items()]
    with TemporaryDirectory() as folder:
        rows += profiles(Path(folder), options)
    return Measured(
        rows, [Claim(f"seconds until {name} is answered", result["median_seconds"], BOUND) for name, result in results.items()]
    )


def run_command(words: list[str]) -> None:
    """Run the command line once, in a new process."""
    subprocess.run([sys.executable, "cli.py", *words], cwd=ROOT, capture_output=True, check=False)


def profiles(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for the profile of preparing a text, and one for evaluating."""
    text = folder / "text"
    for split, share in (("train", 1.0), ("valid", 0.1), ("test", 0.1)):
        (text / split).mkdir(parents=True)
        words = sample_words(int(options.tokens * share), 100).reshape(-1, 100)
        for number, part in enumerate(range(0, len(words), 500)):
            lines = "\n".join(" ".join(f"w{word}" for word in line) for line in words[part : part + 500])
            (text / split / f"{number:05d}.txt").write_text(lines)
    overrides = [
        *("experiment=trime_ext", "size=small", "train.updates=1", "logger=none", "dataset=folder_words"),
        *(f"dataset.path={text}", f"paths.data={folder}/data", f"paths.outputs={folder}/outputs"),
        *(f"evaluate.tokens={options.scored}", f"datastore.tokens={options.keys}", "trainer.enable_progress_bar=false"),
        f"trainer.accelerator={'cpu' if options.device == 'cpu' else 'gpu'}",
    ]

    def stages(names: str) -> Callable[[], Any]:
        config = compose_config(*overrides, f"stages=[{names}]")
        return lambda: run(config)

    prepared, costs = profile_call(stages("prepare"))
    rows = [row(f"prepare {options.tokens:,} tokens", prepared, costs)]
    rows[0]["seconds at 100M tokens"] = round(prepared * WIKITEXT103 / options.tokens / 1.2)
    stages("pack,fit")()
    evaluated, costs = profile_call(stages("encode,index,tune,evaluate"))
    rows.append(row(f"evaluate {options.scored:,} tokens, {options.keys:,} keys", evaluated, costs))
    return rows


def row(what: str, seconds: float, costs: list[str]) -> dict[str, Any]:
    """Return a row of the results."""
    return {"what": what, "seconds": round(seconds, 2), "largest costs": "; ".join(costs)}


def profile_call(work: Callable[[], Any]) -> tuple[float, list[str]]:
    """Return the seconds of a call, and the three functions with the largest own time, with their shares of it."""
    profile, start = cProfile.Profile(), time.perf_counter()
    profile.runcall(work)
    seconds = time.perf_counter() - start
    table = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    largest = sorted(table.items(), key=lambda item: -item[1][2])[:3]
    total = sum(times[2] for times in table.values())
    return seconds, [f"{function_name(*function)} {times[2] / total:.0%}" for function, times in largest]


def function_name(file: str, line: int, function: str) -> str:
    """Return a function's name, after its file if that is one of the project."""
    path = Path(file)
    return f"{path.relative_to(ROOT)}:{function}" if path.is_relative_to(ROOT) else function
