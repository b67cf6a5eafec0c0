"""plan: what an experiment costs with a larger datastore and on more machines, from small runs of it on this machine.

The experiment is run with a few small datastores (``plan.probes``) and a model of a few updates, unless its own is trained
already. Each artefact's time and size is extrapolated by how it grows with the n entries of the datastore:

    encoding       a + b n
    index          a + b n + t c (n + r c)  c cells: keys are compared with centroids, which r = 640 keys a cell teach
    search         a + b (c + n / c)        centroids, and the keys of a few cells; a + b n if it is exact
    files          a + b n

with a, b >= 0 that fit the probes' relative errors best, and t, the time of a comparison, measured with as many centroids
(small runs hardly have any). Text is prepared in time that grows with its length; packing and training cost what they cost
here, by the speed of their last updates. How machines that search together wait for one another is simulated (``searching``).
Sizes that were run as well (``plan.check``) show the error of the forecast.
"""

from __future__ import annotations

import csv
import logging
import shutil
import time
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf

from trime.data.segments import parse_token_count
from trime.errors import UserError
from trime.inspection.growth import CONSTANT, LINEAR, SHARED, Growth, Law
from trime.inspection.searching import cost_by_cells, cost_by_rows, searching
from trime.io import partial_of, write_json
from trime.memory.retrieval.datastore import Keys, Shards, check_k
from trime.memory.retrieval.factories import AUTO, EXACT_UP_TO, cell_count, choose_factory, complete_factory
from trime.memory.retrieval.ivf import SAMPLE, STEPS, nearest_centroid
from trime.memory.retrieval.sharded import IndexPart, divides_by_cells, split_cells
from trime.pipeline.artefact import Artefact
from trime.pipeline.manifest import build_seconds
from trime.pipeline.processes import device_of
from trime.places import Place
from trime.plan.by_task import build_plan
from trime.plan.language_model import Plan
from trime.quantities import duration
from trime.report.tables import markdown
from trime.stages.datastore import check_index

log = logging.getLogger(__name__)

LOG_EVERY, VALIDATED = 5, 512  # updates and tokens in the small runs
PROBED = ("prepare", "pack", "fit", "encode", "datastore", "tune", "evaluate")
GROWING = ("encode", "datastore", "tune", "evaluate")  # with the datastore
DIVIDED = ("pack", "encode", "tune", "evaluate")  # stages that engine= shares among machines
MIN_PROBES = 2  # as many as a law has terms
KEYS = 2**13  # that are compared with centroids to time it
COMPARISONS = SAMPLE * STEPS  # of training keys with each centroid, for each cell
CODES_PROBE = 32  # cells that a probe of an index with codes visits


class Cost(NamedTuple):
    """An artefact of a stage: the laws of its seconds and bytes."""

    stage: str
    kind: str
    seconds: Law
    size: Law


class CostForecast:
    """The costs of an experiment for any size of its datastore."""

    def __init__(self, plan: Plan):
        self.plan, self.config = plan, plan.config
        settings = self.config.plan
        if not plan.memories.datastores:
            raise UserError("stages=[plan]: this experiment has no datastore to plan for: choose one with an external memory")
        if self.config.datastore.path:
            raise UserError("stages=[plan] encodes datastores of its own: leave datastore.path out")
        self.make(plan, "import")
        self.make(plan, "prepare")
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
        for size in (*self.probes, *self.checks):
            self.check_size(size)

    def check_size(self, entries: int) -> None:
        """Raise UserError if the planned kind of index cannot be tried with so few entries."""
        index, width = self.config.index, self.config.model.get("width")
        try:
            check_k(self.plan.memories.datastores[0].index.largest_k, entries)
            if isinstance(width, int):  # that of a pretrained model is known when it is read
                check_index(index, entries, width)
        except UserError as error:
            raise UserError(f"plan.probes and plan.check: {entries:,} entries are too few for this index ({error})") from error
        if index.factory == AUTO and self.factory and entries <= EXACT_UP_TO:
            raise UserError(
                f"plan.probes and plan.check: {entries:,} entries would be searched exactly, but {self.entries:,} by "
                f"{self.factory}: choose sizes above {EXACT_UP_TO:,}"
            )

    @cached_property
    def available(self) -> int:
        """The tokens of the text of the datastore."""
        return len(self.plan.memories.datastores[0].text.corpus().split(self.config.datastore.split).tokens)

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
            self.make(smallest, stage)
        return int(smallest.memories.datastores[0].store.summary()["width"])

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

    @property
    def folder(self) -> Path:
        """Where the small runs lie: apart for each kind of device and engine, which change how long they take."""
        engine = str(self.config.engine._target_).rpartition(".")[2].lower()
        return Place(self.config.paths.outputs).local / "plans" / f"{device_of(self.config).type}-{engine}"

    def variant(self, entries: int, **more: Any) -> Plan:
        """Return the plan of the experiment with a datastore of so many entries, in a folder of its own."""
        updates = min(self.config.train.updates, self.config.plan.updates)
        changes: dict[str, Any] = {
            "paths": {"outputs": str(self.folder)},
            "datastore": {"tokens": entries},
            "train": {"updates": updates, "log_every": LOG_EVERY, "validate_tokens": VALIDATED},
            "trainer": {"num_nodes": 1},
        }
        if self.config.checkpoint or self.plan.fit.folder.is_dir():
            changes["checkpoint"] = str(self.plan.model.folder)
        config = OmegaConf.merge(self.config, changes | more)
        assert isinstance(config, DictConfig)
        return build_plan(config)

    def make(self, plan: Plan, stage: str) -> list[Artefact]:
        """Make the artefacts of a stage, unless they are there; return them. Those of small runs are timed as a whole."""
        artefacts = plan.made_by(stage)
        for artefact in artefacts:
            if artefact.folder.is_relative_to(self.folder):  # others may be resumed, or being made by another command
                shutil.rmtree(partial_of(artefact.folder), ignore_errors=True)
            artefact.make()
        return artefacts

    def artefacts(self, entries: int) -> list[tuple[str, Artefact]]:
        """Make what a datastore of so many entries takes, unless it is there; return it, each artefact with its stage."""
        log.info(f"plan: a run with {entries:,} entries")
        probe = self.probe(entries)
        return [(stage, artefact) for stage in PROBED for artefact in self.make(probe, stage)]

    @cached_property
    def costs(self) -> list[Cost]:
        """The cost of each artefact, from the probes."""
        runs = [self.artefacts(size) for size in self.probes]
        return [self.cost(same[0][0], [artefact for _, artefact in same]) for same in zip(*runs, strict=True)]

    def cost(self, stage: str, artefacts: list[Artefact]) -> Cost:
        """Return the laws of an artefact from those of the probes; they are one if it does not depend on the datastore."""
        if len({artefact.name for artefact in artefacts}) == 1:
            of_text: Growth = (lambda n: max(1.0, n / self.available),)  # with more text than there is here
            growth = {"prepare": of_text, "datastore": of_text, "pack": SHARED}.get(stage, CONSTANT)
            factors = [0.0] * (len(growth) - 1)
            return Cost(stage, artefacts[0].kind, *(Law(growth, [*factors, value]) for value in measured(artefacts[0])))
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
        """Return the seconds of the whole training: as long as it took, or by the speed of the probe's last updates."""
        config, fit = self.config, self.plan.fit
        if config.checkpoint or not config.train.updates:
            return 0.0
        if fit.folder.is_dir():
            return build_seconds(fit.folder)
        short = self.variant(self.probes[0]).fit
        report, lines = short.read("train.json"), csv.DictReader((short.path() / "metrics.csv").read_text().splitlines())
        speeds = [float(line["tokens_per_second"]) for line in lines if line["tokens_per_second"]]
        speed = speeds[-1] if speeds else report["tokens_per_second"]
        return float(report["tokens"] / report["updates"] / speed * config.train.updates)

    def lines(self) -> list[list[Any]]:
        """Return the stages with their seconds on one machine and on all, and the bytes that they write."""
        lines = []
        for stage in PROBED:
            parts = [cost for cost in self.costs if cost.stage == stage]
            alone = self.training() if stage == "fit" else sum(cost.seconds.at(self.entries) for cost in parts)
            if not alone:
                continue
            shared = sum(cost.seconds.on_machines(self.entries, self.nodes) for cost in parts)
            together = shared if stage in DIVIDED else alone
            lines.append([stage, alone, together, sum(cost.size.at(self.entries) for cost in parts)])
        return lines

    def searching(self) -> list[dict[str, Any]]:
        """Return how fast the machines search one index together, and what a slow or a lost one costs, by simulation."""
        if self.nodes == 1:
            return []
        here, k, metric = self.probes[-1], self.plan.memories.datastores[0].index.largest_k, self.config.index.metric
        probe = self.probe(here)
        (searched,) = probe.memories.datastores
        built, folder, store = searched.index.summary(), searched.index.path(), searched.store.path()
        keys, nprobe, part_bytes = Keys(Shards(store)), built.get("nprobe", 1), self.searched_bytes() / self.nodes
        if divides_by_cells(built["index"] if self.factory else None):
            cost = cost_by_cells(keys, split_cells(folder, self.nodes, metric), nprobe, k)
            cells = self.cells(self.entries)
            growth = self.entries / cells / (here / self.cells(here))
            own = comparison_seconds(self.width, int(cells), metric) * cells * cost.queries
            return searching(cost, growth, own, part_bytes)
        search = IndexPart(store, 0, here, folder, built["index"] if self.factory else None, metric).search(nprobe)
        compared = self.compared(here, nprobe), self.compared(self.entries / self.nodes, nprobe, self.entries)
        return searching(cost_by_rows(keys, search, k, *compared, self.nodes), 1.0, 0.0, part_bytes)

    def compared(self, rows: float, nprobe: int, entries: float | None = None) -> float:
        """Return how many keys and centroids a query is compared with in so many rows of an index of ``entries``."""
        cells = self.cells(entries or rows) if self.factory else 1
        return cells + nprobe * rows / cells if self.factory else rows

    def searched_bytes(self) -> float:
        """Return the bytes of what all machines search together."""
        searched = "datastore" if self.factory else "encode"
        return max(cost.size.at(self.entries) for cost in self.costs if cost.kind == searched)

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


def measured(artefact: Artefact) -> tuple[float, float]:
    """Return the seconds of an artefact's build, which its manifest rounds to hundredths, and the bytes of its files."""
    files = [file.stat().st_size for file in artefact.folder.rglob("*") if file.is_file()]
    return max(0.01, build_seconds(artefact.folder)), float(sum(files))


def waiting_table(waiting: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a line for each case that ``searching`` has simulated."""
    header = ["machines", "queries a second", "of what is possible", "a request takes", "the slowest in a hundred", "more time"]
    lines = [
        [
            line["machines_are"],
            f"{line['queries_per_second']:,.0f}",
            f"{100 * line['of_ideal']:.0f} %",
            duration(line["request_seconds"]),
            duration(line["slowest_percent_seconds"]),
            duration(line["seconds_more"]),
        ]
        for line in waiting
    ]
    return markdown(header, lines)


def write_cost_plan(plan: Plan, provenance: dict[str, Any]) -> Path:
    """Print the forecast of an experiment's costs and write it as JSON, with what made it; return the file."""
    costs = CostForecast(plan)
    lines, errors, nodes, waiting = costs.lines(), costs.errors(), costs.nodes, costs.searching()
    total = [sum(line[column] for line in lines) for column in (1, 2, 3)]
    print(f"\n{costs.config.name} with {costs.entries:,} entries, index {costs.factory or 'exact'}:\n")
    header = ["stage", "one machine", *([f"{nodes} machines"] if nodes > 1 else []), "GB on disk"]
    table = [
        [stage, duration(alone), *([duration(together)] if nodes > 1 else []), f"{size / 1e9:.3g}"]
        for stage, alone, together, size in [*lines, ["all", *total]]
    ]
    print(markdown(header, table))
    print(f"Searching reads an index of {costs.searched_bytes() / nodes / 1e9:.3g} GB on each machine.")
    if nodes > 1:
        sent, received = (
            4 * costs.width,
            12 * costs.plan.memories.datastores[0].index.largest_k,
        )  # float32 keys; distances and row numbers
        print(
            f"That is with index.parts={nodes} index.engine=ray: a query sends {sent:,} bytes and the numbers of its cells to "
            f"each machine, which answers with at most {received:,}. Searched by all for all, simulated:\n"
        )
        print(waiting_table(waiting))
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
            *({"stage": "search", "entries": costs.entries, **line} for line in waiting),
        ],
    }
    kind = f"{costs.config.name}-{costs.entries}-{nodes}-{costs.factory or 'exact'}-{provenance['config_hash'][:8]}"
    file = Place(costs.config.paths.outputs).local / "plans" / f"{kind}.json"
    write_json(file, content)
    print(f"\nplan: {file}\nThe small runs lie in {costs.folder}, for further plans; delete it when there are none.")
    return file
