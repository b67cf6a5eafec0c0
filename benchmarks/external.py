"""Evaluation with an external memory (K = 1,024) beside the same without it, by kind of search; windows of 512 tokens.

TRIME's model of 7M parameters, trained for a few updates on the embedded corpus (``--path DIR``: other text), encodes the store
and the text that is scored: keys and queries are real ones. Both sides have the local memory and 512 recent contexts, and their
time is that of encoding and of scoring; ``index s`` is that of encoding and indexing the store. ``mass`` is what the K entries
that were found weigh over what the exact K weigh.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from benchmarks.measure import ROOT, Claim, Measured, alternately, composed, ratio
from trime.memory.external import ExternalMemory
from trime.memory.retrieval.search import MIN_POINTS_PER_CELL, recall_of
from trime.metrics import perplexity
from trime.pipeline.processes import device_of
from trime.pipeline.rows import rows_of
from trime.plan.language_model import Plan
from trime.run.runner import run
from trime.stages.datastore import Index, cell_count, complete_factory, uses_external
from trime.stages.encode import windows_of
from trime.stages.memories import Memories, Sources
from trime.stages.tune import LossSums, sample_queries, scorer_of

ENOUGH, BOUND = 0.8, 5.0  # recall, and times plain evaluation


def kinds_of(entries: int) -> list[tuple[str, str | None, int]]:
    """Name, factory and visited cells: as many cells as index=auto has for so many keys, and up to four times as many."""
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
    parser.add_argument("--keys", nargs="+", default=["1M"], help="entries of the store; several: one after the other")
    parser.add_argument("--tokens", default="8k", help="tokens that are scored")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--updates", type=int, default=20, help="of training")
    parser.add_argument("--path", type=Path, help="a folder of train/ valid/ test/ text in place of the embedded corpus")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, as on the command line of cli.py")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--rounds", type=int, default=2)


def configured(options: argparse.Namespace, keys: str, *more: str) -> DictConfig:
    """The experiment over so many keys with one setting of everything that would be tuned."""
    text = ["dataset=folder", f"dataset.path={options.path}"] if options.path else []
    given = [
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
    return composed(given)


class Contest:
    """One kind of search, or none: a pass over the encoded split, and what its search found."""

    def __init__(self, config: DictConfig):
        self.config, plan = config, Plan(config)
        self.encoded, self.device = plan.valid, device_of(config)
        rows = rows_of(config)
        self.index = Index(config, plan.store) if uses_external(config) else None
        if self.index:
            self.index.make()
        self.scorer = scorer_of(config, rows, Memories(config, Sources(self.index, plan.stored_corpus)), self.encoded)

    def __call__(self) -> float:
        """The loss, the least of those of a grid."""
        sums = LossSums()
        for window, (score,) in self.scorer.scores(windows_of(self.encoded.path(), self.device)):
            sums.add(window, score)
        return float(sums.total.min()) / sums.tokens

    def found(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Score and number of the nearest."""
        external = self.scorer.memories["external"]
        assert isinstance(external, ExternalMemory)
        return external.nearest.search.nearest(query, external.nearest.k)


def measure(options: argparse.Namespace) -> Measured:
    """Every size of store."""
    sizes = [of_size(options, keys) for keys in options.keys]
    return Measured([row for rows in sizes for row in rows], [claim_of(rows) for rows in sizes])


def claim_of(rows: list[dict[str, Any]]) -> Claim:
    """Of the fastest search that finds enough."""
    enough = [row["over plain"] for row in rows if row.get("recall", 0) >= ENOUGH]
    claim = f"time over evaluation without the external memory, recall at least {ENOUGH}, {rows[0]['keys']:,} keys"
    return Claim(claim, min(enough, default=math.inf), BOUND)


def of_size(options: argparse.Namespace, keys: str) -> list[dict[str, Any]]:
    """Every kind of search in turn."""
    config = configured(options, keys, "stages=[prepare,pack,fit,encode]")
    run(config)
    without = {"none": Contest(configured(options, keys, "evaluate.rows=[{joint: [local, long]}]"))}
    entries = Plan(config).store.information()["tokens"]
    kinds = {
        f"{kind} {factory}, {probe} cells" if factory else kind: Contest(
            configured(options, keys, f"index.factory={factory or 'null'}", f"index.probe={probe}")
        )
        for kind, factory, probe in kinds_of(entries)
    }
    contests = without | kinds
    losses: dict[str, float] = {}

    def passed(name: str) -> None:
        losses[name] = contests[name]()

    found = alternately({name: partial(passed, name) for name in contests}, options.rounds, warmup=0)
    encoded = contests["none"].encoded.information()
    queries = sample_queries(contests["none"].encoded.path()).to(contests["none"].device)
    scores, exact = kinds["exact"].found(queries)
    scale = queries.shape[1] ** 0.5
    plain_seconds = [encoded["seconds"] + seconds for seconds in found["none"]["rounds"]]
    rows = []
    for name, contest in contests.items():
        seconds = [encoded["seconds"] + own for own in found[name]["rounds"]]
        row: dict[str, Any] = {"keys": entries, "search": name}
        row |= {"tokens/s": round(encoded["tokens"] / sorted(seconds)[len(seconds) // 2])}
        row |= {"over plain": ratio(seconds, plain_seconds), "perplexity": round(perplexity(losses[name]), 3)}
        if contest.index:
            score, number = contest.found(queries)
            mass = ((score / scale).logsumexp(1) - (scores / scale).logsumexp(1)).exp().mean()
            row |= {"recall": recall_of(exact, number), "mass": round(float(mass), 4)}
            row |= {"index s": contest.index.statistics()["build_seconds"]}
        rows.append(row | {"peak_memory_mb": found[name]["peak_memory_mb"]})
    return rows
