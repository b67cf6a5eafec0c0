"""Work that is cut into parts, by one process with one thread and by two such processes (engine=processes).

The built-in corpus is packed, encoded by a model at size=small that has barely been trained, and evaluated with a datastore
that is searched exactly. Whole commands are timed: start, loading and all.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import ROOT, Claim, Measured, alternately, ratio

ENGINES = {
    "one process": ["engine=local"],
    "two processes": ["engine=processes", "engine.workers=2", "engine.threads=1"],
}
SETTINGS = {"pack": ["segments.length=8"]}  # of a stage, which would take a second otherwise
MADE = {  # what each stage makes anew
    "pack": "data/packed/pack-*",
    "evaluate": "outputs/artefacts/evaluate-*",
    "encode": "outputs/artefacts/encode-*",  # last, since the stages before need it
}
BOUND = 1 / 1.7  # of the seconds of one process, by two


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of the datastore")
    parser.add_argument("--evaluated", type=int, default=16_500, help="tokens of the test split that are scored")
    parser.add_argument("--size", default="small", help="size of the model: size=")
    parser.add_argument("--stages", nargs="+", default=[*MADE], choices=[*MADE])
    parser.add_argument("--rounds", type=int, default=2)


def measure(options: argparse.Namespace) -> Measured:
    """Measure both engines in turns, on the same text and model, stage by stage."""
    rows, claims = [], []
    with TemporaryDirectory() as folder:
        command = [
            *("experiment=trime_ext_no_long", "mixture=none", "index=exact", "train.updates=1", f"size={options.size}"),
            *(f"datastore.tokens={options.tokens}", f"evaluate.tokens={options.evaluated}", "tune.temperature=[1]"),
            *("threads=1", "logger=none", f"paths.outputs={folder}/outputs", f"paths.data={folder}/data"),
        ]
        run([*command, "stages=[prepare,pack,fit,encode,datastore,tune,evaluate]"])
        for stage in options.stages:
            own = [*command, *SETTINGS.get(stage, []), f"stages=[{stage}]"]
            contestants = {name: partial(make, Path(folder), stage, [*own, *words]) for name, words in ENGINES.items()}
            results = alternately(contestants, options.rounds, warmup=0)
            rows += [{"what": stage, "by": name, "seconds": result["median_seconds"]} for name, result in results.items()]
            one, two = (result["rounds"] for result in results.values())
            claims.append(Claim(f"{stage}: seconds of two processes over one", ratio(two, one), BOUND))
    return Measured([row | {"tokens": options.tokens, "evaluated": options.evaluated} for row in rows], claims)


def make(folder: Path, stage: str, command: list[str]) -> None:
    """Make anew what a stage makes."""
    for artefact in folder.glob(MADE[stage]):
        shutil.rmtree(artefact)
    run(command)


def run(words: list[str]) -> None:
    """Run the command line in a new process; CalledProcessError if it fails."""
    subprocess.run([sys.executable, "cli.py", *words], cwd=ROOT, capture_output=True, check=True)
