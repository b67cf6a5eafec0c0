"""Cost of TRIME's memories in real trainings: the stage fit of each experiment beside that of the plain language model.

Every training is that of ``python cli.py experiment=NAME size=small``, cut to a few updates: it includes data, embedding,
optimiser and clipping, and as in any training the first twentieth of the updates has no memory. Ratios are of processor time
per token, which for one thread equals the time on an idle machine; tokens per second are wall-clock, whatever else is running.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numba
import torch
from omegaconf import DictConfig

from benchmarks.measure import ROOT, Measured, alternately, ratio
from trime.config.compose import compose_config
from trime.lab.runner import run
from trime.stages.graph import Graph

EXPERIMENTS, UPDATES = ("vanilla", "trime", "trime_long", "trime_ext"), 40


class Training(NamedTuple):
    """The cost of a training: processor seconds per token, and tokens per second of wall-clock time."""

    seconds: float
    speed: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="small", help="a file of conf/size")
    parser.add_argument("--updates", type=int, default=UPDATES, help="updates of each training")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, as on the command line of cli.py")


def make_config(options: argparse.Namespace, experiment: str) -> DictConfig:
    """Return the configuration of a training up to the stage pack, with almost no validation."""
    return compose_config(
        *(f"experiment={experiment}", f"size={options.size}", "stages=[prepare,pack]", "logger=none"),
        *(f"train.updates={options.updates}", "train.validate_tokens=512", "trainer.enable_progress_bar=false"),
        *(f"paths.data={options.outputs}/data", f"paths.outputs={options.outputs}", "trainer.devices=1"),
        *(f"trainer.accelerator={'cpu' if options.device == 'cpu' else 'gpu'}", *options.set),
    )


def measure(options: argparse.Namespace) -> Measured:
    """Train each experiment in every round; the first round is not counted."""
    torch.set_num_threads(options.threads)
    numba.set_num_threads(options.threads)
    plans = {name: Graph(make_config(options, name)) for name in EXPERIMENTS}
    for graph in plans.values():
        run(graph.config)
    trainings: dict[str, list[Training]] = {name: [] for name in EXPERIMENTS}
    alternately({name: partial(train, graph, trainings[name]) for name, graph in plans.items()}, options.rounds, warmup=1)
    counted = {name: rounds[1:] for name, rounds in trainings.items()}
    return Measured([row(name, counted) for name in EXPERIMENTS], [])


def train(graph: Graph, trainings: list[Training]) -> None:
    """Train a model from scratch and append its cost to ``trainings``."""
    shutil.rmtree(graph.fit.folder, ignore_errors=True)
    start = time.process_time()
    graph.fit.make()
    seconds = time.process_time() - start
    report = json.loads((graph.fit.folder / "train.json").read_text())
    trainings.append(Training(seconds / report["tokens"], report["tokens_per_second"]))


def row(name: str, trainings: dict[str, list[Training]]) -> dict[str, Any]:
    """Return a row with the cost of an experiment's training, and its ratio to the plain model's in the same round."""
    seconds, plain = ([training.seconds for training in trainings[which]] for which in (name, "vanilla"))
    return {
        "what": name,
        "processor ms a token": round(1000 * statistics.median(seconds), 4),
        "over plain": ratio(seconds, plain),
        "rounds": [round(a / b, 3) for a, b in zip(seconds, plain, strict=True)],
        "tokens/s": round(statistics.median(training.speed for training in trainings[name])),
    }
