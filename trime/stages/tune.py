"""tune: searches τ, τ', λ and memory sizes on a full grid for every row, in one pass over the validation split."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trime.common.identity import Free
from trime.common.io import write_json, write_tensors
from trime.common.metrics import ResourceUsage, Usage
from trime.common.types import Float, Tensor
from trime.lab.artefact import Artefact, Lab
from trime.lab.engines import Advance
from trime.lab.parts import ArtefactInParts, columns_of, grouped, read_part
from trime.lab.stage import RunOutcome, Stage
from trime.scoring.loss_sums import LossSums, summarize_row
from trime.scoring.mixture_spec import FittedMixtureSpec, MassCollector, MixtureSpec
from trime.scoring.mixtures.experts import ExpertMasses, concat_masses
from trime.scoring.scorer import Scorer, memory_names
from trime.stages.encode import Encode, read_windows
from trime.stages.memories import Memories
from trime.stages.scoring import Scoring, SplitParts, add_sums, build_scorer, sums_as_tensors, windows_of
from trime.token_memory.search.datastore import KNNMemory
from trime.token_memory.search.search import ExactSearch, recall_of

log = logging.getLogger(__name__)

GRIDS = {  # the grid of a tuned value, where its name is another
    "cache_temperature": "interpolation_temperature",
    "cache_lambda": "interpolation_share",
    "lambda": "interpolation_share",
}
SAMPLE = 256  # validation queries on which an approximate index's recall is measured


class TunedRows(Artefact):
    """The rows of a table at their best settings on the validation split, and the memories that they use."""

    encoded: Encode  # the validation split
    memories: Memories

    @abstractmethod
    def rows(self) -> Sequence[MixtureSpec | FittedMixtureSpec]:
        """Return the rows at their best settings."""

    @abstractmethod
    def tuned(self) -> dict[str, Any]:
        """Return the best settings of all rows, with their loss."""

    def for_row(self, row: int) -> TunedRows:
        """Return the tuning run used for row ``row``."""
        return self


@dataclass(frozen=True, eq=False, repr=False)
class Tune(TunedRows, ArtefactInParts):
    """The best settings on the grid, with their loss: ``tuned.json``, and masses for the mixture that is to be fitted."""

    kind, format = "tune", 8

    grid_rows: tuple[MixtureSpec, ...]  # rows whose settings are searched on the grid
    fitted_row: Free[FittedMixtureSpec | None]  # the row whose mixture is fitted to the masses of this pass
    most_masses: int | None  # tokens whose masses are kept for it; None: all, or no row is fitted
    encoded: Encode
    memories: Memories
    grid: dict[str, Any]  # the section tune
    scoring: Scoring
    lab: Free[Lab]

    def identity(self) -> Any:
        row = self.fitted_row  # its masses do not depend on how they are mixed
        return super().identity() | {"masses": row and [row.memory_order, row.temperatures, row.sizes]}

    @property
    def all_rows(self) -> list[MixtureSpec | FittedMixtureSpec]:
        """All rows of the table, the one that is fitted last."""
        return [*self.grid_rows, *([self.fitted_row] if self.fitted_row else [])]

    def open_parts(self, folder: Path) -> TuneParts:
        return TuneParts(self, folder)

    def build(self, folder: Path) -> None:
        parts, rows = self.open_parts(folder), self.grid_rows
        self.make_parts(parts, f"tune {self.encoded.split}")
        sums, masses, usage = [LossSums() for _ in rows], [], Usage()
        for tensors, note in map(read_part, parts.files()):
            usage.add(note)
            add_sums(sums, tensors)
            if collected := columns_of(tensors, "masses"):
                masses.append(ExpertMasses(**collected))
                experts, counts = note["experts"], note["counts"]
        if masses:
            assert self.fitted_row
            write_tensors(folder / "expert_masses.safetensors", concat_masses(masses)._asdict())
            in_order = {name: experts[name] for name in self.fitted_row.memory_order}
            write_json(folder / "expert_masses.json", {"experts": in_order, "counts": counts}, indent=None)
        results = [summarize_row(row, row_sums) for row, row_sums in zip(rows, sums, strict=True)]
        for result in results:
            result["at_grid_edge"] = at_grid_edge(result["tuned"], self.grid)
            for name in result["at_grid_edge"]:
                best = f"{name}={result['tuned'][name]}"
                log.warning(
                    f"tune: {result['memories']}: {best} is at the edge of the grid: widen tune.{GRIDS.get(name, name)}"
                )
        content = {"rows": results, "seconds": round(usage.seconds, 1), "peak_memory_mb": usage.peak_memory_mb}
        searched = {name: memory.nearest for name, memory in parts.scorer.memories.items() if memory.nearest}
        if searched:
            content["recall"] = {name: recall(nearest, self.encoded.path()) for name, nearest in searched.items()}
        write_json(folder / "tuned.json", content)

    def tuned(self) -> dict[str, Any]:
        return self.read("tuned.json")

    def expert_masses(self) -> tuple[ExpertMasses, dict[str, Any]]:
        """Return the masses collected for the mixture that is to be fitted, and the description of its experts."""
        parts = load_file(self.path() / "expert_masses.safetensors")
        return ExpertMasses(**parts), self.read("expert_masses.json")

    def rows(self) -> Sequence[MixtureSpec | FittedMixtureSpec]:
        results = self.tuned()["rows"]
        return [row.with_settings(result["tuned"]) for row, result in zip(self.grid_rows, results, strict=True)]


class TuneParts(SplitParts):
    """Parts of the validation split: summed losses of every row's grid, and the masses for a mixture that is to be fitted."""

    def __init__(self, tune: Tune, folder: Path):
        super().__init__(folder, tune.encoded, tune.memories.state_scope(memory_names(tune.all_rows)))
        self.tune = tune

    @cached_property
    def scorer(self) -> Scorer:
        """The scorer of all rows, the one whose mixture is fitted last."""
        return build_scorer(self.tune.scoring, self.tune.all_rows, self.tune.memories, self.tune.encoded)

    def make(self, number: int, advance: Advance) -> None:
        rows, fitted, part, scorer = self.tune.grid_rows, self.tune.fitted_row, self.parts[number], self.scorer
        meter, sums = ResourceUsage(), [LossSums() for _ in rows]
        limit = self.tune.most_masses
        collector = MassCollector(fitted, None if limit is None else limit - part.before) if fitted else None
        for window, masses in scorer.query(windows_of(self.tune.encoded, part)):
            for row_sums, row, row_masses in zip(sums, rows, masses, strict=False):
                row_sums.add_losses(window, row.losses(window.vocabulary, row_masses))
            if collector:
                collector.add(window, masses[-1])
            advance(len(window.vocabulary.total))
        note, tensors = meter.note(), sums_as_tensors(sums)
        if collector and collector.parts:
            tensors |= grouped("masses", collector.masses()._asdict())
            note |= {"experts": collector.experts, "counts": collector.counts(scorer.memories)}
        write_tensors(self.file(number), tensors, note)


def at_grid_edge(tuned: dict[str, float], grid: Any) -> list[str]:
    """Return the settings whose best value is the smallest or largest of its grid, so that a better one may lie beyond.

    Grids of one or two values, which are choices rather than ranges, do not count, nor does the size of the long memory.
    """
    grids = {name: list(grid[GRIDS.get(name, name)]) for name in tuned if name != "memory_size"}
    return [name for name, values in grids.items() if len(values) > 2 and tuned[name] in (min(values), max(values))]


def recall(nearest: KNNMemory, folder: Path) -> dict[str, Any]:
    """Return the share of the exact K nearest entries that the index finds, over a sample of validation queries."""
    if nearest.search.kind == "exact":
        return {"recall": 1.0, "queries": 0}
    queries = sample_queries(folder)
    _, exact = ExactSearch(nearest.store.keys.blocks, nearest.metric).nearest(queries, nearest.k)
    _, retrieved = nearest.search.nearest(queries, nearest.k)
    return {"recall": recall_of(exact, retrieved), "queries": len(queries)}


def sample_queries(folder: Path) -> Float[Tensor, "n d"]:
    """Return SAMPLE queries of an encoded split at even distances."""
    queries = torch.cat([window.query.g for window in read_windows(folder, torch.device("cpu"))])
    return queries[:: max(1, len(queries) // SAMPLE)][:SAMPLE]


def loss_on_valid(graph: Any) -> RunOutcome:
    """Return the loss of the experiment's own row on valid, which a search minimises."""
    return RunOutcome(graph.tune.tuned()["rows"][-1]["loss"])


TUNE = Stage("tune", lambda graph: graph.tune.build_order(), report=loss_on_valid)
