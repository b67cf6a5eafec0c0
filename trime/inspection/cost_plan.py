"""plan: what an experiment costs with a larger datastore and on more machines, from small runs of it on this machine.

The experiment is run with a few small datastores (``plan.probes``) and a model of a few updates, unless its own is trained
already. Each artefact's time and size is extrapolated by how it grows with the n entries of the datastore:

    encoding       a + b n
    index          a + b n + t c (n + r c)  c cells: keys are compared with centroids, which r = 640 keys a cell teach
    search         a + b (c + n / c)        centroids, and the keys of a few cells; a + b n if it is exact
    files          a + b n

with a, b >= 0 that fit the probes' relative errors best, and t, the time of a comparison, measured with as many centroids
(small runs hardly have any). What does not depend on the datastore costs what it cost here. Sizes that were run as well
(``plan.check``) show the error of the forecast.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from scipy.optimize import nnls

from trime.data.segments import parse_token_count
from trime.errors import UserError
from trime.io import write_atomically
from trime.memory.retrieval.factories import AUTO, cell_count, choose_factory, complete_factory
from trime.memory.retrieval.ivf import SAMPLE, STEPS, nearest_centroid
from trime.pipeline.artefact import Artefact
from trime.pipeline.manifest import build_seconds
from trime.plan.by_task import build_plan
from trime.plan.language_model import Plan
from trime.report.tables import markdown

log = logging.getLogger(__name__)

PROBED = ("prepare", "pack", "fit", "encode", "datastore", "tune", "evaluate")
GROWING = ("encode", "datastore", "tune", "evaluate")  # with the datastore
DIVIDED = ("pack", "encode", "tune", "evaluate")  # stages that engine= shares among machines
Growth = tuple[Callable[[float], float], ...]
CONSTANT: Growth = (lambda n: 1.0,)
LINEAR: Growth = (*CONSTANT, lambda n: n)
MIN_PROBES = 2  # as many as a law has terms
KEYS = 2**13  # that are compared with centroids to time it
COMPARISONS = SAMPLE * STEPS  # of training keys with each centroid, for each cell
CODES_PROBE = 32  # cells that a probe of an index with codes visits


class Law(NamedTuple):
    """A sum of terms that grow with the number of entries, and of a part that is known."""

    growth: Growth
    factors: list[float]
    known: Callable[[float], float] = lambda n: 0.0

    @classmethod
    def fitted(
        cls, growth: Growth, sizes: list[int], values: list[float], known: Callable[[float], float] = lambda n: 0.0
    ) -> Law:
        """Return the law of the least relative errors at these sizes."""
        pairs = [*zip(sizes, values, strict=True)]
        terms = np.array([[term(n) / value for term in growth] for n, value in pairs])
        rest = np.array([max(0.0, 1 - known(n) / value) for n, value in pairs])
        scale = terms.max(0)
        return cls(growth, (nnls(terms / scale, rest)[0] / scale).tolist(), known)

    def at(self, n: int) -> float:
        """Return the value for n entries."""
        return self.known(n) + sum(factor * term(n) for factor, term in zip(self.factors, self.growth, strict=True))

    def on_machines(self, n: int, machines: int) -> float:
        """Return the value where all but the first, constant term is shared."""
        fixed = self.factors[0] * self.growth[0](n)
        return fixed + (self.at(n) - fixed) / machines


class Cost(NamedTuple):
    """An artefact of a stage: the laws of its seconds and bytes."""

    stage: str
    kind: str
    seconds: Law
    size: Law


class CostPlan:
    """The costs of an experiment for any size of its datastore."""

    def __init__(self, plan: Plan):
        self.plan, self.config = plan, plan.config
        settings = self.config.plan
        if plan.index is None:
            raise UserError("stages=[plan]: this experiment has no datastore to plan for: choose one with an external memory")
        self.nodes = int(settings.nodes)
        self.probes = sorted(parse_token_count(size) or 0 for size in settings.probes)
        self.entries = parse_token_count(settings.tokens) or self.available
        if len(set(self.probes)) < MIN_PROBES:
            raise UserError(f"plan.probes={list(settings.probes)}: at least {MIN_PROBES} different sizes are needed")
        largest = max(self.probes[-1], *self.checks, 0)
        if largest > self.available:
            raise UserError(
                f"the text of the datastore has {self.available:,} tokens, {largest:,} are asked for: set plan.probes and "
                "plan.check to smaller sizes, or name a longer text by dataset="
            )

    @cached_property
    def available(self) -> int:
        """The tokens of the text of the datastore."""
        self.plan.stored_corpus.make()
        return len(self.plan.stored_corpus.corpus().split(self.config.datastore.split).tokens)

    @property
    def checks(self) -> list[int]:
        """The sizes that are run only to be compared with their forecast."""
        return [parse_token_count(size) or 0 for size in self.config.plan.check]

    @cached_property
    def factory(self) -> str | None:
        """The kind of the index of the planned size: that of the configuration, or what index=auto will choose."""
        chosen = self.config.index.factory
        return choose_factory(self.entries, self.width, self.nodes) if chosen == AUTO else chosen

    @cached_property
    def width(self) -> int:
        """The width of a key."""
        smallest = self.variant(self.probes[0])
        for stage in PROBED[: PROBED.index("encode") + 1]:
            make(smallest, stage)
        return int(smallest.store.summary()["width"])

    def cells(self, entries: float) -> float:
        """Return the number of cells of an index of so many entries."""
        kind = self.probe(self.probes[0]).config.index.factory
        kind = "Cells" if kind == AUTO else kind
        return cell_count(complete_factory(kind, int(entries), self.width) or "")

    def probe(self, entries: int) -> Plan:
        """Return the plan of the experiment with so many entries and the kind of index that the planned size has."""
        if self.config.index.factory != AUTO or (self.factory or "").startswith("Cells"):
            return self.variant(entries)
        codes = {"factory": "IVF_PQ", "nprobe": CODES_PROBE}
        return self.variant(entries, index=codes if self.factory else {"factory": None})

    def variant(self, entries: int, **more: Any) -> Plan:
        """Return the plan of the experiment with a datastore of so many entries, in a folder of its own."""
        changes: dict[str, Any] = {
            "paths": {"outputs": str(Path(self.config.paths.outputs) / "plans")},
            "datastore": {"tokens": entries},
            "train": {"updates": min(self.config.train.updates, self.config.plan.updates)},
        }
        if not self.config.checkpoint and self.plan.fit.folder.is_dir():
            changes["checkpoint"] = str(self.plan.fit.folder)
        config = OmegaConf.merge(self.config, changes | more)
        assert isinstance(config, DictConfig)
        return build_plan(config)

    def artefacts(self, entries: int) -> list[tuple[str, Artefact]]:
        """Make what a datastore of so many entries takes, unless it is there; return it, each artefact with its stage."""
        log.info(f"plan: a run with {entries:,} entries")
        probe = self.probe(entries)
        return [(stage, artefact) for stage in PROBED for artefact in make(probe, stage)]

    @cached_property
    def costs(self) -> list[Cost]:
        """The cost of each artefact, from the probes."""
        runs = [self.artefacts(size) for size in self.probes]
        return [self.cost(same[0][0], [artefact for _, artefact in same]) for same in zip(*runs, strict=True)]

    def cost(self, stage: str, artefacts: list[Artefact]) -> Cost:
        """Return the laws of an artefact from those of the probes; they are one if it does not depend on the datastore."""
        if len({artefact.name for artefact in artefacts}) == 1:
            return Cost(stage, artefacts[0].kind, *(Law(CONSTANT, [value]) for value in measured(artefacts[0])))
        seconds, sizes = (list(values) for values in zip(*map(measured, artefacts), strict=True))
        size = Law.fitted(LINEAR, self.probes, sizes)
        if not self.factory or stage == "encode":
            law = Law.fitted(LINEAR, self.probes, seconds)
        elif stage == "datastore":
            law = Law.fitted(LINEAR, self.probes, seconds, self.comparing)
        else:
            law = Law.fitted((*CONSTANT, lambda n: self.cells(n) + n / self.cells(n)), self.probes, seconds)
        return Cost(stage, artefacts[0].kind, law, size)

    def comparing(self, entries: float) -> float:
        """Return the seconds in which centroids are learned from keys, and so many keys compared with all of them."""
        cells = self.cells(entries)
        return comparison_seconds(self.width, cells, self.config.index.metric) * cells * (entries + COMPARISONS * cells)

    def training(self) -> float:
        """Return the seconds of the whole training: as long as it took, or by the speed of its first updates."""
        config, fit = self.config, self.plan.fit
        if config.checkpoint or not config.train.updates:
            return 0.0
        if fit.folder.is_dir():
            return build_seconds(fit.folder)
        report = self.probe(self.probes[0]).fit.read("train.json")
        return float(report["seconds"]) / report["updates"] * config.train.updates

    def lines(self) -> list[list[Any]]:
        """Return the stages with their seconds on one machine and on all, and the bytes that they write."""
        lines = []
        for stage, costs in groupby(self.costs, lambda cost: cost.stage):
            parts = [*costs]
            alone = self.training() if stage == "fit" else sum(cost.seconds.at(self.entries) for cost in parts)
            shared = sum(cost.seconds.on_machines(self.entries, self.nodes) for cost in parts)
            together = shared if stage in DIVIDED else alone
            lines.append([stage, alone, together, sum(cost.size.at(self.entries) for cost in parts)])
        return lines

    def errors(self) -> list[list[Any]]:
        """Return stage, size, forecast and measured seconds of the sizes that are to be checked, and of all these stages."""
        lines = []
        for entries in self.checks:
            found = [(stage, measured(artefact)[0]) for stage, artefact in self.artefacts(entries)]
            pairs = [*zip(self.costs, found, strict=True)]
            for name, stages in (*((stage, {stage}) for stage in GROWING), ("all", {*GROWING})):
                forecast = sum(cost.seconds.at(entries) for cost, _ in pairs if cost.stage in stages)
                lines.append([name, entries, forecast, sum(seconds for _, (own, seconds) in pairs if own in stages)])
        return lines


@cache
def comparison_seconds(width: int, cells: int, metric: str) -> float:
    """Return the seconds of comparing a key with a centroid, among so many."""
    generator = torch.Generator().manual_seed(0)
    keys, centroids = (torch.randn(n, width, generator=generator) for n in (KEYS, cells))
    times = []
    for _ in range(3):
        started = time.perf_counter()
        nearest_centroid(keys, centroids.numpy(), metric)
        times.append(time.perf_counter() - started)
    return min(times) / (KEYS * cells)


def make(plan: Plan, stage: str) -> list[Artefact]:
    """Make the artefacts of a stage, unless they are there; return them."""
    artefacts = plan.made_by(stage)
    for artefact in artefacts:
        artefact.make()
    return artefacts


def measured(artefact: Artefact) -> tuple[float, float]:
    """Return the seconds of an artefact's build, which its manifest rounds to hundredths, and the bytes of its files."""
    files = [file.stat().st_size for file in artefact.folder.rglob("*") if file.is_file()]
    return max(0.01, build_seconds(artefact.folder)), float(sum(files))


def duration(seconds: float) -> str:
    """Return seconds as a person would say them."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} seconds"


def write_cost_plan(plan: Plan, provenance: dict[str, Any]) -> Path:
    """Print the forecast of an experiment's costs and write it as JSON, with what made it; return the file."""
    costs = CostPlan(plan)
    lines, errors, nodes = costs.lines(), costs.errors(), costs.nodes
    stored = sum(cost.size.at(costs.entries) for cost in costs.costs if cost.stage == "datastore")
    total = [sum(line[column] for line in lines) for column in (1, 2, 3)]
    print(f"\n{costs.config.name} with {costs.entries:,} entries, index {costs.factory or 'exact'}:\n")
    header = ["stage", "one machine", *([f"{nodes} machines"] if nodes > 1 else []), "GB on disk"]
    table = [
        [stage, duration(alone), *([duration(together)] if nodes > 1 else []), f"{size / 1e9:.3g}"]
        for stage, alone, together, size in [*lines, ["all", *total]]
    ]
    print(markdown(header, table))
    print(f"Searching reads an index of {stored / nodes / 1e9:.3g} GB on each machine.")
    if nodes > 1:
        sent, received = 4 * costs.width, 12 * costs.plan.max_neighbours  # float32 keys; distances and row numbers
        print(f"A query sends at most {sent:,} bytes to a machine, and gets {received:,} back.")
    if errors:
        print("\nThe forecast beside sizes that were run:\n")
        rows = [[stage, f"{n:,}", duration(f), duration(m), f"{100 * (f / m - 1):+.0f} %"] for stage, n, f, m in errors]
        print(markdown(["stage", "entries", "forecast", "measured", "error"], rows))
    content = provenance | {
        "entries": costs.entries,
        "machines": nodes,
        "probes": costs.probes,
        "index": costs.factory or "exact",
        "rows": [
            *(
                {"stage": s, "entries": costs.entries, "seconds": a, "seconds_on_machines": t, "bytes": b}
                for s, a, t, b in lines
            ),
            *({"stage": s, "entries": n, "forecast": f, "measured": m} for s, n, f, m in errors),
        ],
    }
    file = Path(costs.config.paths.outputs) / "plans" / f"{costs.config.name}-{costs.entries}-{nodes}.json"
    write_atomically(file, json.dumps(content, indent=1))
    print(f"\nplan: {file}")
    return file
