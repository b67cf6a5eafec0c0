"""What an experiment costs with a larger datastore and on more machines, from small runs of it on this machine.

The experiment runs with a few small datastores (--probes) and a model of a few updates, unless its own is trained already. The
time and size of each artefact is extrapolated by how it grows with the n entries of the datastore:

    encoding, files  a + b n
    index            a + b n + t c (n + r c)  c cells: keys are compared with centroids, which r = 640 keys a cell teach
    search           a + b (c + n / c)        centroids, and the keys of a few cells; a + b n if it is exact

with a, b >= 0 of the least relative errors on the probes, and t, the time of a comparison, measured with as many centroids, of
which small runs have hardly any. Text is prepared in time that grows with its length. Sizes that are run as well (--check) show
the error.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from scipy.optimize import nnls

from benchmarks.measure import Claim, Measured
from trime.common.io import partial_of
from trime.config.compose import compose_config
from trime.data.segments import parse_token_count
from trime.errors import UserError
from trime.lab.artefact import Artefact
from trime.lab.manifest import build_seconds
from trime.stages.graph import Graph
from trime.stages.preflight import build_graph
from trime.token_memory.search.index import AUTO, cell_count, choose_factory, complete_factory
from trime.token_memory.search.ivf import SAMPLE, STEPS, nearest_centroid

STAGES = ("prepare", "pack", "fit", "encode", "index", "tune", "evaluate")
GROWING = ("encode", "index", "tune", "evaluate")  # with the datastore
DIVIDED = ("pack", "encode", "tune", "evaluate")  # stages that engine=ray shares among machines
KEYS = 2**13  # that are compared with centroids to time it
Growth = Callable[[float], float]  # of a term of a law with the number of entries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="+", help="the experiment, as on the command line of cli.py")
    parser.add_argument("--tokens", nargs="+", default=["100M", "1B", "10B"], help="entries of the datastores to forecast")
    parser.add_argument("--probes", nargs="+", default=["160k", "320k", "640k"], help="datastores of the small runs")
    parser.add_argument("--check", nargs="*", default=[], help="further sizes that are run and compared with their forecast")
    parser.add_argument("--machines", type=int, default=16, help="machines that share the work")
    parser.add_argument("--updates", type=int, default=20, help="updates of the small runs' model")


def measure(options: argparse.Namespace) -> Measured:
    """Run the probes, and forecast the costs of the sizes that are asked for."""
    probes, sizes, checks = (sizes_of(words) for words in (options.probes, options.tokens, options.check))
    config = compose_config(*options.overrides)
    if not build_graph(config).memories.datastores:
        raise UserError("this experiment has no datastore: choose one with an external memory, as trime_ext")
    runs = [made(small_run(config, entries, sizes[-1], options.updates)) for entries in probes]
    kinds = [by_kind(run) for run in runs]
    laws = [law_of(config, probes, sizes[-1], [artefacts[kind] for artefacts in kinds], kind) for kind in kinds[0]]
    rows: list[dict[str, Any]] = []
    for entries in sizes:
        for stage in STAGES:
            parts = [(seconds, size) for (name, _), seconds, size in laws if name == stage]
            alone = sum(value_at(seconds, entries) for seconds, _ in parts)
            shared = sum(value_at(seconds, entries, options.machines) for seconds, _ in parts)
            rows.append(
                {
                    "what": "forecast",
                    "entries": entries,
                    "stage": stage,
                    "seconds": alone,
                    f"seconds, {options.machines} machines": shared if stage in DIVIDED else alone,
                    "GB": sum(value_at(size, entries) for _, size in parts) / 1e9,
                }
            )
    claims = []
    for entries in checks:
        found = by_kind(made(small_run(config, entries, sizes[-1], options.updates)))
        forecast = sum(value_at(seconds, entries) for kind, seconds, _ in laws if kind[0] in GROWING)
        measured = sum(cost_of(artefact)[0] for kind, artefact in found.items() if kind[0] in GROWING)
        rows.append({"what": "check", "entries": entries, "stage": "all", "forecast": forecast, "seconds": measured})
        claims.append(Claim(f"error of the forecast of {entries:,} entries", abs(forecast / measured - 1), 0.2))
    return Measured(rows, claims)


def sizes_of(words: list[str]) -> list[int]:
    """Return numbers of tokens, such as 160k, in rising order."""
    return sorted(parse_token_count(word) or 0 for word in words)


def small_run(config: DictConfig, entries: int, planned: int, updates: int) -> Graph:
    """Return the graph of the experiment with a datastore of ``entries``, and the kind of index that that many get."""
    changes: dict[str, Any] = {
        "paths": {"outputs": str(Path(config.paths.outputs) / "sizing")},
        "datastore": {"tokens": entries},
        "train": {"updates": min(config.train.updates, updates), "validate_tokens": 512},
    }
    if config.index.factory == AUTO:
        kind = choose_factory(planned, int(config.model.width), 1)
        changes["index"] = {"factory": kind and kind.rstrip("0123456789")}  # as Cells of a number that suits the size
    small: DictConfig = OmegaConf.merge(config, changes)  # type: ignore[assignment]
    return build_graph(small)


def made(graph: Graph) -> list[tuple[str, Artefact]]:
    """Make all artefacts of a small run, each with its stage; what an interrupted run began is timed from the start."""
    found = [(stage, artefact) for stage in STAGES for artefact in graph.artefacts_of(stage)]
    for _, artefact in found:
        shutil.rmtree(partial_of(artefact.folder), ignore_errors=True)
        artefact.make()
    return found


def by_kind(run: list[tuple[str, Artefact]]) -> dict[tuple[str, int], Artefact]:
    """Return the artefacts of a run by their stage and their number in it."""
    stages = [stage for stage, _ in run]
    return {(stage, stages[:place].count(stage)): artefact for place, (stage, artefact) in enumerate(run)}


Law = list[tuple[float, Growth]]  # factors and terms


def law_of(
    config: DictConfig, probes: list[int], planned: int, artefacts: list[Artefact], kind: tuple[str, int]
) -> tuple[tuple[str, int], Law, Law]:
    """Return the laws of an artefact's seconds and bytes."""
    stage = kind[0]
    costs = [cost_of(artefact) for artefact in artefacts]
    if len({artefact.name for artefact in artefacts}) == 1:  # it does not depend on the datastore
        grows: Growth = (lambda n: max(1.0, n / probes[-1])) if stage == "prepare" else lambda n: 1.0
        return kind, [(costs[0][0], grows)], [(costs[0][1], grows)]
    constant, linear, width = (lambda n: 1.0), (lambda n: n), int(config.model.width)
    factory = choose_factory(planned, width, 1) if config.index.factory == AUTO else config.index.factory

    def cells(n: float) -> float:
        return float(cell_count(complete_factory(str(factory), int(n), width) or ""))

    def comparing(n: float) -> float:
        if not factory or stage != "index":
            return 0.0
        return comparison_seconds(width, cells(n), config.index.metric) * cells(n) * (n + SAMPLE * STEPS * cells(n))

    searches = factory and stage in ("tune", "evaluate")
    terms: list[Growth] = [constant, (lambda n: cells(n) + n / cells(n)) if searches else linear]
    seconds = fitted(terms, probes, [max(0.0, cost[0] - comparing(n)) for n, cost in zip(probes, costs, strict=True)])
    return kind, [*seconds, (1.0, comparing)], fitted([constant, linear], probes, [cost[1] for cost in costs])


def fitted(terms: list[Growth], sizes: list[int], values: list[float]) -> Law:
    """Return the factors >= 0 of the least relative errors."""
    weights = np.array([[term(n) / max(value, 1e-2) for term in terms] for n, value in zip(sizes, values, strict=True)])
    scale = weights.max(0)
    factors = nnls(weights / scale, np.ones(len(sizes)))[0] / scale
    return [*zip(factors.tolist(), terms, strict=True)]


def value_at(law: Law, entries: int, machines: int = 1) -> float:
    """Return the value of a law where all but the first, constant term is shared among machines."""
    first, *rest = (factor * term(entries) for factor, term in law)
    return float(first + sum(rest) / machines)


@cache  # it takes seconds, and laws ask for it again and again
def comparison_seconds(width: int, cells: float, metric: str) -> float:
    """Return the seconds of comparing a key with a centroid, among as many."""
    generator = torch.Generator().manual_seed(0)
    keys, centroids = (torch.randn(n, width, generator=generator) for n in (KEYS, int(cells)))
    times = []
    for _ in range(3):
        started = time.perf_counter()
        nearest_centroid(keys, centroids.numpy(), metric)
        times.append(time.perf_counter() - started)
    return min(times) / (KEYS * cells)


def cost_of(artefact: Artefact) -> tuple[float, float]:
    """Return the seconds of an artefact's build, which its manifest rounds to hundredths, and the bytes of its files."""
    size = sum(file.stat().st_size for file in artefact.folder.rglob("*") if file.is_file())
    return max(0.01, build_seconds(artefact.folder)), float(size)
