"""Encoding a datastore's text by one process with one thread, and by two such processes (engine=processes).

A model at size=small, barely trained, encodes the built-in corpus. Whole commands are timed: start, loading and all.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import ROOT, Claim, Measured, alternately

ENGINES = {
    "one process": ["engine=local"],
    "two processes": ["engine=processes", "engine.workers=2", "engine.threads=1"],
}
BOUND = 1 / 1.7  # of the seconds of one process, by two


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of the datastore")
    parser.add_argument("--size", default="small", help="size of the model: size=")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Measured:
    """Measure both engines in turns, on the same text and model."""
    with TemporaryDirectory() as folder:
        command = [
            *("experiment=knn_lm", "train.updates=1", "evaluate.tokens=2k", f"datastore.tokens={options.tokens}"),
            *(f"size={options.size}", "threads=1", "logger=none"),
            *(f"paths.outputs={folder}/outputs", f"paths.data={folder}/data"),
        ]
        run([*command, "stages=[prepare,fit]"])
        contestants = {name: partial(encode, Path(folder), [*command, *words]) for name, words in ENGINES.items()}
        results = alternately(contestants, options.rounds, warmup=0)
    rows = [
        {
            "what": f"encode, {name}",
            "tokens": options.tokens,
            "seconds": result["median_seconds"],
            "tokens/s": round(options.tokens / result["median_seconds"]),
        }
        for name, result in results.items()
    ]
    one, two = (row["seconds"] for row in rows)
    return Measured(rows, [Claim("seconds of two processes over one", round(two / one, 3), BOUND)])


def encode(folder: Path, command: list[str]) -> None:
    """Encode the text anew."""
    for artefact in folder.glob("outputs/artefacts/encode-*"):
        shutil.rmtree(artefact)
    run([*command, "stages=[encode]"])


def run(words: list[str]) -> None:
    """Run the command line in a new process; CalledProcessError if it fails."""
    subprocess.run([sys.executable, "cli.py", *words], cwd=ROOT, capture_output=True, check=True)
