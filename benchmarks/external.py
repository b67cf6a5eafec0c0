"""Evaluation with an external memory (K = 1,024) beside evaluation without it, by kind of search; windows of 512 tokens.

Keys and queries are real: TRIME's model of 7M parameters, trained for a few updates on the built-in corpus (or other text with
``--path DIR``), encodes the datastore and the scored text. Both sides have the local memory and 512 recent contexts, and their
time includes encoding and scoring; ``index s`` is the time to encode and index the datastore. ``mass`` is the weight of the K
retrieved entries relative to that of the exact K.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from benchmarks.measure import ROOT, Claim, Measured, alternately, ratio
from trime.common.metrics import perplexity
from trime.config.compose import compose_config
from trime.lab.runner import run
from trime.scoring.loss_sums import LossSums
from trime.scoring.rows import rows_of
from trime.stages.encode import read_windows
from trime.stages.graph import Graph
from trime.stages.scoring import build_scorer
from trime.stages.tune import sample_queries
from trime.token_memory.search.index import cell_count, complete_factory
from trime.token_memory.search.search import MIN_POINTS_PER_CELL, recall_of
from trime.token_memory.test.external import ExternalMemory

ENOUGH, BOUND = 0.8, 5.0  # minimal recall, and maximal time over evaluation without the external memory


def kinds_of(entries: int) -> list[tuple[str, str | None, int]]:
    """Return (name, factory, nprobe) of each kind of search, with the cells of index=auto or up to four times as many."""
    few = cell_count(str(complete_factory("Cells", entries, 1)))
    many = max(1, min(4 * few, entries // MIN_POINTS_PER_CELL))
    return [
        ("exact", None, 1),
        *(("faiss", f"IVF{few}_SQ8", probe) for probe in (4, 8, 16, 32)),
        *(("cells", f"Cells{few}", probe) for probe in (4, 8, 16, 32)),
        *(("cells", f"Cells{many}", probe) for probe in (16, 32, 64)),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="7m", help="a file of conf/model")
    parser.add_argument("--keys", nargs="+", default=["1M"], help="entries of the datastore, one size or several")
    parser.add_argument("--tokens", default="8k", help="scored tokens")
    parser.add_argument("--window", type=int, default=512, help="tokens per window")
    parser.add_argument("--updates", type=int, default=20, help="training updates")
    parser.add_argument("--path", type=Path, help="a folder of train/ valid/ test/ text in place of the built-in corpus")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, as on the command line of cli.py")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--rounds", type=int, default=2)


def make_config(options: argparse.Namespace, keys: str, *more: str) -> DictConfig:
    """Return the configuration for a number of keys, with one value for everything that would be tuned."""
    text = ["dataset=folder_words", f"dataset.path={options.path}"] if options.path else []
    overrides = [
        *("experiment=trime_ext", f"model={options.model}", "size=small", *text),
        *(f"train.updates={options.updates}", f"datastore.tokens={keys}", f"evaluate.tokens={options.tokens}"),
        *(
            f"evaluate.block={options.window}",
            "evaluate.context=0",
            "tune.temperature=[1]",
            "tune.memory_size=[512]",
            "logger=none",
        ),
        "mixture=none",
        "evaluate.rows=[{joint: [local, long, external]}]",
        *(f"paths.data={options.outputs}/data", f"paths.outputs={options.outputs}", "trainer.enable_progress_bar=false"),
        *(f"trainer.accelerator={'cpu' if options.device == 'cpu' else 'gpu'}", *options.set, *more),
    ]
    return compose_config(*overrides)


class Contestant:
    """One kind of search, or none: a call scores the encoded split and returns the loss."""

    def __init__(self, config: DictConfig):
        self.config, graph = config, Graph(config)
        self.encoded, self.device = graph.valid, graph.hardware.device
        self.index = next((memory.index for memory in graph.memories.datastores), None)
        if self.index:
            self.index.make()
        self.scorer = build_scorer(graph.scoring, rows_of(config), graph.memories, self.encoded)

    def __call__(self) -> float:
        """Return the loss, the lowest of the grid."""
        sums = LossSums()
        for window, (score,) in self.scorer.score_rows(read_windows(self.encoded.path(), self.device)):
            sums.add(window, score)
        return float(sums.total.min()) / sums.tokens

    def search(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of the nearest entries."""
        external = self.scorer.memories["external"]
        assert isinstance(external, ExternalMemory)
        return external.nearest.search.nearest(query, external.nearest.k)


def measure(options: argparse.Namespace) -> Measured:
    """Measure every size of the datastore."""
    sizes = [measure_size(options, keys) for keys in options.keys]
    return Measured([row for rows in sizes for row in rows], [claim_of(rows) for rows in sizes])


def claim_of(rows: list[dict[str, Any]]) -> Claim:
    """Return the claim about the fastest search with enough recall."""
    enough = [row["over plain"] for row in rows if row.get("recall", 0) >= ENOUGH]
    claim = f"time over evaluation without the external memory, recall at least {ENOUGH}, {rows[0]['keys']:,} keys"
    return Claim(claim, min(enough, default=math.inf), BOUND)


def measure_size(options: argparse.Namespace, keys: str) -> list[dict[str, Any]]:
    """Return a row for each kind of search, measured in turns."""
    config = make_config(options, keys, "stages=[prepare,pack,fit,encode]")
    run(config)
    without = {"none": Contestant(make_config(options, keys, "evaluate.rows=[{joint: [local, long]}]"))}
    entries = Graph(config).store_of(config).read("encode.json")["tokens"]
    kinds = {
        f"{kind} {factory}, {probe} cells" if factory else kind: Contestant(
            make_config(options, keys, f"index.factory={factory or 'null'}", f"index.nprobe={probe}")
        )
        for kind, factory, probe in kinds_of(entries)
    }
    contestants = without | kinds
    losses: dict[str, float] = {}

    def evaluate(name: str) -> None:
        losses[name] = contestants[name]()

    results = alternately({name: partial(evaluate, name) for name in contestants}, options.rounds, warmup=0)
    encoded = contestants["none"].encoded.summary()
    queries = sample_queries(contestants["none"].encoded.path()).to(contestants["none"].device)
    scores, exact = kinds["exact"].search(queries)
    scale = queries.shape[1] ** 0.5
    plain_seconds = [encoded["seconds"] + seconds for seconds in results["none"]["rounds"]]
    rows = []
    for name, contestant in contestants.items():
        seconds = [encoded["seconds"] + scoring for scoring in results[name]["rounds"]]
        row: dict[str, Any] = {"keys": entries, "search": name}
        row |= {"tokens/s": round(encoded["tokens"] / sorted(seconds)[len(seconds) // 2])}
        row |= {"over plain": ratio(seconds, plain_seconds), "perplexity": round(perplexity(losses[name]), 3)}
        if contestant.index:
            score, number = contestant.search(queries)
            mass = ((score / scale).logsumexp(1) - (scores / scale).logsumexp(1)).exp().mean()
            row |= {"recall": recall_of(exact, number), "mass": round(float(mass), 4)}
            row |= {"index s": contestant.index.summary()["build_seconds"]}
        rows.append(row | {"peak_memory_mb": results[name]["peak_memory_mb"]})
    return rows
