"""The adaptive mixture beside Eq. 6 over the same memories: time of its fit, and of scoring with encoding.

A small model, trained for a few updates on the built-in corpus, scores valid with the local memory, then also with the long,
then also with the external memory. Both sides read the same encoded text with the same memories; the fit is that of the command
line, on all of PyTorch's threads.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig

from benchmarks.measure import ROOT, Claim, Measured, alternately, ratio
from trime.config.compose import compose_config
from trime.lab.runner import run
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec
from trime.stages.encode import read_windows
from trime.stages.graph import Graph
from trime.stages.scoring import build_scorer
from trime.stages.tune import TuneMixture

MEMORIES = (("local",), ("local", "long"), ("local", "long", "external"))
SLOWER, SECONDS = 1.05, 30.0  # maximal time over that of Eq. 6; maximal seconds of a fit to 100,000 tokens on one core


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", default="100k", help="tokens of valid to which the mixture is fitted and which are scored")
    parser.add_argument("--keys", default="200k", help="entries of the datastore")
    parser.add_argument("--updates", type=int, default=20, help="training updates")
    parser.add_argument("--size", default="small", help="a file of conf/size")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, as on the command line of cli.py")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--rounds", type=int, default=5)


def make_config(options: argparse.Namespace, memories: tuple[str, ...]) -> DictConfig:
    """Return the configuration with one value for everything that would be tuned."""
    overrides = [
        *("experiment=trime_ext", f"size={options.size}", f"train.updates={options.updates}", "logger=none"),
        *(f"datastore.tokens={options.keys}", f"evaluate.tokens={options.tokens}", "evaluate.sample=documents"),
        *("tune.temperature=[1]", "tune.memory_size=[8192]", f"evaluate.rows=[{{joint: [{', '.join(memories)}]}}]"),
        *("stages=[prepare,pack,fit,encode,index,tune]", "trainer.enable_progress_bar=false"),
        *(f"paths.data={options.outputs}/data", f"paths.outputs={options.outputs}"),
        *(f"trainer.accelerator={'cpu' if options.device == 'cpu' else 'gpu'}", *options.set),
    ]
    return compose_config(*overrides)


def measure(options: argparse.Namespace) -> Measured:
    """Fit the mixtures, then score the same text with all rows in turns."""
    plans = {", ".join(memories): Graph(make_config(options, memories)) for memories in MEMORIES}
    contestants = {}
    for memories, graph in plans.items():
        run(graph.config)
        for row in graph.tune.rows():
            contestants[memories, row.mixture] = partial(score, graph, row)
    results = alternately(contestants, options.rounds, warmup=1)
    encoded = next(iter(plans.values())).valid.summary()
    seconds = {key: [encoded["seconds"] + scoring for scoring in results[key]["rounds"]] for key in contestants}
    lines = [
        {
            "memories": memories,
            "mixture": mixture,
            "tokens": encoded["tokens"],
            "tokens/s": round(encoded["tokens"] / median(times)),
            "over joint": ratio(times, seconds[memories, "joint"]),
            "scoring alone, over joint": ratio(results[memories, mixture]["rounds"], results[memories, "joint"]["rounds"]),
            "fit s": fit_of(plans[memories])["seconds"] if mixture == "adaptive" else "",
            "peak_memory_mb": results[memories, mixture]["peak_memory_mb"],
        }
        for (memories, mixture), times in seconds.items()
    ]
    fitted = fit_of(plans[", ".join(MEMORIES[-1])])
    per_100k = round(fitted["seconds"] / fitted["row"]["tokens"] * 100_000, 1)
    claims = [
        Claim(f"evaluation by the adaptive mixture over that by Eq. 6: {line['memories']}", line["over joint"], SLOWER)
        for line in lines
        if line["mixture"] == "adaptive"
    ]
    claims.append(Claim(f"seconds of a fit for each 100,000 tokens, {torch.get_num_threads()} threads", per_100k, SECONDS))
    return Measured(lines, claims)


def fit_of(graph: Graph) -> dict[str, Any]:
    """Return the record of a graph's fitted mixture."""
    assert isinstance(graph.tune, TuneMixture)
    return graph.tune.summary()


def score(graph: Graph, row: MixtureSpec | FittedMixtureSpec) -> None:
    """Score the encoded text once with a row."""
    scorer = build_scorer(graph.scoring, [row], graph.memories, graph.valid)
    for _ in scorer.score_rows(read_windows(graph.valid.path(), graph.hardware.device)):
        pass
