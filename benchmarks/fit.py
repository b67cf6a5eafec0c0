"""What TRIME's memories cost in real trainings: stage fit of each experiment beside the plain language model's, in turns.

Every training is that of ``python cli.py experiment=NAME size=small``, cut to a few updates: data, embedding, optimiser and
clipping are in, and as in any training the first twentieth of the updates is plain. Ratios are of seconds a token.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numba
import torch
from omegaconf import DictConfig

from benchmarks.measure import ROOT, Measured, alternately, composed, ratio
from trime.run import run
from trime.stages.plan import Plan

EXPERIMENTS = ("vanilla", "trime", "trime_long", "trime_ext")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="small", help="a file of conf/size")
    parser.add_argument("--updates", type=int, default=40, help="of each training")
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
    speeds: dict[str, list[float]] = {name: [] for name in EXPERIMENTS}
    alternately({name: partial(train, plan, speeds[name]) for name, plan in plans.items()}, options.rounds, warmup=1)
    counted = {name: values[1:] for name, values in speeds.items()}
    return Measured([row(name, counted) for name in EXPERIMENTS], [])


def train(plan: Plan, speeds: list[float]) -> None:
    """Train a model anew, and note the tokens per second that the training reports."""
    shutil.rmtree(plan.fit.folder, ignore_errors=True)
    plan.fit.make()
    speeds.append(json.loads((plan.fit.folder / "train.json").read_text())["tokens_per_second"])


def row(name: str, speeds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the speed of an experiment's training, and its seconds a token over the plain model's in the same round."""
    return {
        "what": name,
        "tokens/s": round(statistics.median(speeds[name])),
        "over plain": ratio(speeds["vanilla"], speeds[name]),
        "rounds": [round(plain / own, 3) for plain, own in zip(speeds["vanilla"], speeds[name], strict=True)],
    }
