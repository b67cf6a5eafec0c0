"""tune: searches τ, τ', λ and memory sizes on a full grid for every row, in one pass over the validation split."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig
from safetensors.torch import load_file

from trime.data.segments import parse_token_count
from trime.evaluation.fitted_mixture_spec import FittedMixtureSpec, MassCollector
from trime.evaluation.loss_sums import LossSums, summarize_row
from trime.evaluation.mixture_spec import MixtureSpec
from trime.evaluation.scorer import Scorer, memory_names
from trime.io import write_tensors
from trime.memory.base import Memory, Window
from trime.memory.external import ExternalMemory
from trime.memory.retrieval.datastore import KNNMemory
from trime.memory.retrieval.search import ExactSearch, recall_of
from trime.metrics import ResourceUsage
from trime.mixtures.experts import ExpertMasses
from trime.pipeline.artefact import Artefact
from trime.pipeline.processes import device_of
from trime.pipeline.rows import MixtureSpecs
from trime.pipeline.settings import Keys
from trime.progress import Progress
from trime.stages.encode import Encode, read_windows
from trime.stages.memories import Memories
from trime.types import Float, Tensor

log = logging.getLogger(__name__)

GRIDS = {  # the grid of a tuned value, where its name is another
    "cache_temperature": "interpolation_temperature",
    "cache_lambda": "interpolation_share",
    "lambda": "interpolation_share",
}
SCORING = ("evaluate.scaled_interpolation", "compatibility.sorted_windows")  # the settings that build_scorer reads
SAMPLE = 256  # validation queries on which an approximate index's recall is measured


class TunedRows(Artefact):
    """The rows of a table at their best settings on the validation split, which ``encoded`` is.

    ``memories`` are those that the rows use.
    """

    def __init__(self, config: DictConfig, encoded: Encode, memories: Memories):
        super().__init__(config)
        self.encoded, self.memories = encoded, memories

    @abstractmethod
    def rows(self) -> Sequence[MixtureSpec | FittedMixtureSpec]:
        """Return the rows at their best settings."""

    @abstractmethod
    def tuned(self) -> dict[str, Any]:
        """Return the best settings of all rows, with their loss."""

    def for_row(self, row: int) -> TunedRows:
        """Return the pass whose settings apply to a row."""
        return self


class Tune(TunedRows):
    """The best settings on the grid, with their loss: ``tuned.json``, and masses for the mixture that is to be fitted."""

    kind, format = "tune", 5
    depends_on: ClassVar[Keys] = ("tune", *SCORING)
    unhashed: ClassVar[Keys] = ("mixture.tokens",)

    def __init__(self, config: DictConfig, table: MixtureSpecs, encoded: Encode, memories: Memories):
        super().__init__(config, encoded, memories)
        self.table = table

    def needs(self) -> list[Artefact]:
        return [self.encoded, *self.memories.needs()]

    def settings(self) -> Any:
        limit = {"tokens": self.config.mixture.tokens} if self.fitted_row else {}
        rows = [repr(row) for row in self.grid_rows()]
        row = self.fitted_row
        fitted = [(row.memory_order, row.temperatures, row.sizes)] if row else []  # what its masses depend on
        settings = {"rows": rows, "fitted": fitted, "memories": self.memories.settings(), "sampled": SAMPLE}
        return super().settings() | settings | limit

    @property
    def fitted_row(self) -> FittedMixtureSpec | None:
        """The row whose mixture is fitted to the masses of this pass, if there is one."""
        return next((row for row in self.table if isinstance(row, FittedMixtureSpec)), None)

    def grid_rows(self) -> list[MixtureSpec]:
        """Return the rows whose settings are searched on the grid."""
        return [row for row in self.table if isinstance(row, MixtureSpec)]

    def build(self, folder: Path) -> None:
        meter, encoded = ResourceUsage(), self.encoded
        rows, fitted = self.grid_rows(), [self.fitted_row] if self.fitted_row else []
        scorer = build_scorer(self.config, [*rows, *fitted], self.memories, encoded)
        sums = [LossSums() for _ in rows]
        collectors = [MassCollector(row, parse_token_count(self.config.mixture.tokens)) for row in fitted]
        for window, masses in scorer.masses(with_progress(encoded, "tune")):
            for row_sums, row, row_masses in zip(sums, rows, masses, strict=False):
                row_sums.add(window, row.score(window.vocabulary, row_masses))
            for collector in collectors:
                collector.add(window, masses[-1])
        for collector in collectors:
            save_masses(collector, folder, scorer.memories)
        results = [summarize_row(row, row_sums) for row, row_sums in zip(rows, sums, strict=True)]
        for result in results:
            result["at_grid_edge"] = at_grid_edge(result["tuned"], self.config.tune)
            for name in result["at_grid_edge"]:
                best = f"{name}={result['tuned'][name]}"
                log.warning(
                    f"tune: {result['memories']}: {best} is at the edge of the grid: widen tune.{GRIDS.get(name, name)}"
                )
        content = {"rows": results, "seconds": round(meter.seconds, 1), "peak_memory_mb": meter.peak_memory_mb}
        if external := scorer.memories.get("external"):
            assert isinstance(external, ExternalMemory)
            content["recall"] = recall(external.nearest, encoded.path())
        (folder / "tuned.json").write_text(json.dumps(content, indent=1))

    def tuned(self) -> dict[str, Any]:
        return self.read("tuned.json")

    def expert_masses(self) -> tuple[ExpertMasses, dict[str, Any]]:
        """Return the masses collected for the mixture that is to be fitted, and the description of its experts."""
        parts = load_file(self.path() / "expert_masses.safetensors")
        return ExpertMasses(**parts), self.read("expert_masses.json")

    def rows(self) -> Sequence[MixtureSpec | FittedMixtureSpec]:
        results = self.tuned()["rows"]
        return [row.at(result["tuned"]) for row, result in zip(self.grid_rows(), results, strict=True)]


def save_masses(collector: MassCollector, folder: Path, memories: dict[str, Memory]) -> None:
    """Write ``expert_masses.safetensors``, and ``expert_masses.json`` with the number of each memory's experts."""
    write_tensors(folder / "expert_masses.safetensors", collector.masses()._asdict())
    description = {"experts": collector.experts, "counts": collector.counts(memories)}
    (folder / "expert_masses.json").write_text(json.dumps(description))


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


def build_scorer(
    config: DictConfig, rows: Sequence[MixtureSpec | FittedMixtureSpec], memories: Memories, encoded: Encode
) -> Scorer:
    """Return a scorer of rows, with the memories that they use opened for the queries of an encoded split."""
    sizes = sorted({size for row in rows if "long" in row.memories for size in row.sizes})
    opened = memories.open_all(encoded.summary(), sizes, memory_names(rows))
    return Scorer(rows, opened, config.evaluate.scaled_interpolation, config.compatibility.sorted_windows)


def with_progress(encoded: Encode, title: str) -> Iterator[Window]:
    """Yield the windows of an encoded split under a progress bar."""
    folder = encoded.path()
    total = encoded.summary()["tokens"]
    with Progress(total=total, unit="tok", unit_scale=True, desc=f"{title} {encoded.split}") as bar:
        for window in read_windows(folder, device_of(encoded.config)):
            yield window
            bar.update(len(window.vocabulary.total))
