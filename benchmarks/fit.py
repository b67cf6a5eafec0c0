"""What TRIME's memories cost in real trainings: stage fit of each experiment beside the plain language model's, in turns.

Every training is that of ``python cli.py experiment=NAME size=small``, cut to a few updates: data, embedding, optimiser and
clipping are in, and as in any training the first twentieth of the updates is plain. Ratios are of the processor's seconds a
token, which with one thread are those of a quiet machine's clock; tokens per second are by the clock, whatever runs beside it.
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

from benchmarks.measure import ROOT, Measured, alternately, composed, ratio
from trime.plan.language_model import Plan
from trime.run.runner import run

EXPERIMENTS, UPDATES = ("vanilla", "trime", "trime_long", "trime_ext"), 40


class Training(NamedTuple):
    """What a training took: the processor's seconds a token, and tokens per second by the clock."""

    seconds: float
    speed: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="small", help="a file of conf/size")
    parser.add_argument("--updates", type=int, default=UPDATES, help="of each training")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, as on the command line of cli.py")


def configured(options: argparse.Namespace, experiment: str) -> DictConfig:
    """Return the configuration of a training up to stage pack; it validates on hardly anything."""
    return composed(
        [
            *(f"experiment={experiment}", f"size={options.size}", "stages=[prepare,pack]", "logger=none"),
            *(f"train.updates={options.updates}", "train.validate_tokens=512", "trainer.enable_progress_bar=false"),
            *(f"paths.data={options.outputs}/data", f"paths.outputs={options.outputs}", "trainer.devices=1"),
            *(f"trainer.accelerator={'cpu' if options.device == 'cpu' else 'gpu'}", *options.set),
        ]
    )


def measure(options: argparse.Namespace) -> Measured:
    """Train each experiment in every round; a first round is not counted."""
    torch.set_num_threads(options.threads)
    numba.set_num_threads(options.threads)
    plans = {name: Plan(configured(options, name)) for name in EXPERIMENTS}
    for plan in plans.values():
        run(plan.config)
    trainings: dict[str, list[Training]] = {name: [] for name in EXPERIMENTS}
    alternately({name: partial(train, plan, trainings[name]) for name, plan in plans.items()}, options.rounds, warmup=1)
    counted = {name: each[1:] for name, each in trainings.items()}
    return Measured([row(name, counted) for name in EXPERIMENTS], [])


def train(plan: Plan, trainings: list[Training]) -> None:
    """Train a model anew, and note what that took."""
    shutil.rmtree(plan.fit.folder, ignore_errors=True)
    begun = time.process_time()
    plan.fit.make()
    seconds = time.process_time() - begun
    report = json.loads((plan.fit.folder / "train.json").read_text())
    trainings.append(Training(seconds / report["tokens"], report["tokens_per_second"]))


def row(name: str, trainings: dict[str, list[Training]]) -> dict[str, Any]:
    """Return the speed of an experiment's training, and its seconds over the plain model's in the same round."""
    own, plain = ([training.seconds for training in trainings[which]] for which in (name, "vanilla"))
    return {
        "what": name,
        "processor ms a token": round(1000 * statistics.median(own), 4),
        "over plain": ratio(own, plain),
        "rounds": [round(a / b, 3) for a, b in zip(own, plain, strict=True)],
        "tokens/s": round(statistics.median(training.speed for training in trainings[name])),
    }
