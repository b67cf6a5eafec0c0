"""tune: searches τ, τ', λ and memory sizes on a full grid for every row, in one pass over the validation split."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors import SafetensorError
from safetensors.torch import load_file

from trime.common.components import build
from trime.common.identity import Free
from trime.common.io import write_json, write_tensors
from trime.common.metrics import ResourceUsage, Usage
from trime.common.types import Float, Tensor
from trime.common.urls import local_copy
from trime.data.corpus import content_hash
from trime.errors import UserError
from trime.lab.artefact import Artefact, Lab
from trime.lab.engines import Advance
from trime.lab.manifest import check_manifest
from trime.lab.shards import ShardedArtefact, Work, prefixed, read_shard, unprefixed
from trime.lab.stage import RunOutcome, Stage
from trime.scoring.loss_sums import LossSums, sum_by_document, summarize_row
from trime.scoring.mixture_spec import FittedMixtureSpec, MassCollector, MixtureSpec
from trime.scoring.mixtures.experts import ExpertMasses, Mixture, concat_masses, folds, score_tokens
from trime.scoring.scorer import Scorer, memory_names
from trime.stages.encode import Encode, read_windows
from trime.stages.memories import Memories
from trime.stages.scoring import Scoring, Span, add_sums, build_scorer, span_file, spans_of, sums_as_tensors, windows_of
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

    def tuned(self) -> dict[str, Any]:
        """Return the best settings of all rows, with their loss."""
        return self.read("tuned.json")

    def for_row(self, row: int) -> TunedRows:
        """Return the tuning run used for row ``row``."""
        return self


@dataclass(frozen=True, eq=False, repr=False)
class Tune(TunedRows, ShardedArtefact):
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

    def work(self, folder: Path, scorer: Callable[[], Scorer] | None = None) -> Work:
        """Return the work on spans of the validation split; ``scorer`` returns the scorer of all rows."""
        spans = spans_of(self.encoded, self.memories.state_scope(memory_names(self.all_rows)))
        files, open_scorer = [span_file(folder, span) for span in spans], scorer or cache(self.scorer)

        def make(number: int, advance: Advance) -> None:
            write_tensors(files[number], *self.score(spans[number], open_scorer(), advance))

        return Work(files, [span.tokens for span in spans], make)

    def scorer(self) -> Scorer:
        """Return the scorer of all rows, the one whose mixture is fitted last."""
        return build_scorer(self.scoring, self.all_rows, self.memories, self.encoded)

    def score(self, span: Span, scorer: Scorer, advance: Advance) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Score a span; return summed losses of every row's grid, the masses for a mixture that is to be fitted, and a note."""
        rows, fitted, limit = self.grid_rows, self.fitted_row, self.most_masses
        meter, sums = ResourceUsage(), [LossSums() for _ in rows]
        collector = MassCollector(fitted, None if limit is None else limit - span.before) if fitted else None
        for window, masses in scorer.query(windows_of(self.encoded, span)):
            for row_sums, row, row_masses in zip(sums, rows, masses, strict=False):
                row_sums.add_losses(window, row.losses(window.vocabulary, row_masses))
            if collector:
                collector.add(window, masses[-1])
            advance(len(window.vocabulary.total))
        note, tensors = meter.note(), sums_as_tensors(sums)
        if collector and collector.collected:
            tensors |= prefixed("masses", collector.masses()._asdict())
            note |= {"experts": collector.experts, "counts": collector.counts(scorer.memories)}
        return tensors, note

    def build(self, folder: Path) -> None:
        rows, scorer = self.grid_rows, cache(self.scorer)
        work = self.work(folder, scorer)
        self.make_shards(work, folder, f"tune {self.encoded.split}")
        sums, masses, usage = [LossSums() for _ in rows], [], Usage()
        for tensors, note in map(read_shard, work.files):
            usage.add(note)
            add_sums(sums, tensors)
            if collected := unprefixed(tensors, "masses"):
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
        searched = {name: memory.nearest for name, memory in scorer().memories.items() if memory.nearest}
        if searched:
            content["recall"] = {name: recall(nearest, self.encoded.path()) for name, nearest in searched.items()}
        write_json(folder / "tuned.json", content)

    def expert_masses(self) -> tuple[ExpertMasses, dict[str, Any]]:
        """Return the masses collected for the mixture that is to be fitted, and the description of its experts."""
        masses = load_file(self.path() / "expert_masses.safetensors")
        return ExpertMasses(**masses), self.read("expert_masses.json")

    def rows(self) -> Sequence[MixtureSpec | FittedMixtureSpec]:
        results = self.tuned()["rows"]
        return [row.with_settings(result["tuned"]) for row, result in zip(self.grid_rows, results, strict=True)]


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


TUNE = Stage(
    "tune",
    lambda graph: graph.tune.build_order(),
    # A search minimises the loss of the experiment's own row.
    report=lambda graph: RunOutcome(graph.tune.tuned()["rows"][-1]["loss"]),
)


@dataclass(frozen=True)
class MixtureSettings:
    """The section ``mixture`` as far as it decides the fit to given masses."""

    model: dict[str, Any]
    folds: int
    seed: int

    def build(self, experts: dict[str, int]) -> Mixture:
        """Return the mixture, not fitted; ``experts``: how many each memory has."""
        mixture = build(self.model)
        mixture.memories = experts
        return mixture

    def fit(self, masses: ExpertMasses, description: dict[str, Any]) -> tuple[Mixture, Float[Tensor, " n"]]:
        """Fit a mixture; return it, and log P of each token by a mixture fitted without the token's fold."""
        mixture, fold = self.build(description["experts"]), folds(masses.document, self.folds, self.seed)
        return mixture, mixture.fit(masses, fold, description["counts"], self.seed)


@dataclass(frozen=True, eq=False, repr=False)
class TuneMixture(TunedRows):
    """The fitted mixture: ``mixture.safetensors`` and ``mixture.json``; rows with a grid have the settings of ``grid``."""

    kind, stage, format = "mixture", "tune", 5
    summary_file = "mixture.json"

    grid: Tune
    mixture: MixtureSettings
    given: Free[Path | None]  # mixture.json of a mixture that is taken instead of fitting one; identity() has its content
    lab: Free[Lab]

    @property
    def encoded(self) -> Encode:  # type: ignore[override]
        return self.grid.encoded

    @property
    def memories(self) -> Memories:  # type: ignore[override]
        return self.grid.memories

    def identity(self) -> Any:
        files = [self.given.with_name(name) for name in (self.given.name, "mixture.safetensors")] if self.given else []
        return super().identity() | {"given": [*map(content_hash, files)]}

    def build(self, folder: Path) -> None:
        row, meter = self.row(), ResourceUsage()
        masses, description = self.grid.expert_masses()
        if self.given:
            mixture = self.mixture.build(description["experts"])
            mixture.load(read_mixture(self.given, description["experts"], row, mixture))
            score = score_tokens(mixture, masses)
        else:
            mixture, score = self.mixture.fit(masses, description)
        result = summarize_row(row, sum_by_document(masses.document, -score))
        result |= {"at_grid_edge": [], "fitted": mixture.describe(), "by_memory_size": {}}  # one size makes no curve
        write_tensors(folder / "mixture.safetensors", mixture.state())
        content = {"row": result, "crossfitted": not self.given, "seconds": round(meter.seconds, 1), **description}
        content |= {"kind": row.kind, "temperatures": row.temperatures, "history": mixture.decays}
        write_json(folder / "mixture.json", content)

    def row(self) -> FittedMixtureSpec:
        """Return the row of the mixture, not fitted."""
        row = self.grid.fitted_row
        assert row is not None
        return row

    def tuned(self) -> dict[str, Any]:
        tuned = self.grid.tuned()
        return tuned | {"rows": [*tuned["rows"], self.summary()["row"]]}

    def rows(self) -> list[MixtureSpec | FittedMixtureSpec]:
        mixture = self.mixture.build(self.summary()["experts"])
        mixture.load(load_file(self.path() / "mixture.safetensors"))
        return [*self.grid.rows(), replace(self.row(), fitted=mixture)]


def given_mixture(config: DictConfig) -> Path | None:
    """Return the ``mixture.json`` of the mixture that ``mixture.path=`` names, if any; UserError if there is none."""
    if not config.mixture.get("path"):
        return None
    file, remedy = local_copy(config.mixture.path) / "mixture.json", "name a mixture-… folder of a run, or fit it anew"
    if not (file.is_file() and file.with_name("mixture.safetensors").is_file()):
        raise UserError(f"mixture.path={config.mixture.path} is not a mixture: {remedy}")
    check_manifest(file.parent, "mixture-.*", remedy, config.artefacts.verify)
    return file


def read_mixture(file: Path, experts: dict[str, int], row: FittedMixtureSpec, mixture: Mixture) -> dict[str, Tensor]:
    """Return the state of a mixture fitted elsewhere; UserError if it is another kind of mixture, or of other memories."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        layout = stored["kind"], [*stored["experts"].items()], tuple(stored["temperatures"]), tuple(stored["history"])
        state = load_file(file.with_name("mixture.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"mixture.path={file.parent} is incomplete or of another version ({error}): fit it anew") from None
    if layout != (row.kind, [*experts.items()], row.temperatures, mixture.decays):
        memories = ", ".join(f"{name} ({size} experts)" for name, size in stored["experts"].items())
        raise UserError(
            f"mixture.path={file.parent} is {stored['kind']}, of {memories}, temperatures {stored['temperatures']}, history "
            f"{stored['history']}: use the same settings here, or fit it anew"
        )
    return state
