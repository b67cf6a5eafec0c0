"""tune: the full grid of τ, τ', λ and memory sizes for every row, in one pass over the validation split."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from trime.data.segments import parse_token_count
from trime.evaluation.fitted_rows import FittedRow
from trime.evaluation.rows import Row
from trime.evaluation.scorer import Scorer, memory_names
from trime.io import plain
from trime.memory.base import Memory, Window
from trime.memory.external import ExternalMemory
from trime.memory.retrieval.datastore import KNNMemory
from trime.memory.retrieval.search import ExactSearch, recall_of
from trime.metrics import ResourceUsage, perplexity
from trime.mixtures.experts import Evidence, concat_evidence, stack_evidence
from trime.pipeline.artefact import Artefact
from trime.pipeline.processes import device_of
from trime.pipeline.rows import rows_of
from trime.stages.encode import Encode, windows_of
from trime.stages.memories import Memories
from trime.types import Float, Mass, Tensor

FEW_DOCUMENTS = 10  # documents below which a bootstrap draws parts of them
PART_TOKENS, MAX_PARTS = 1024, 200  # tokens of the shortest part, and how many parts of few documents there are at most
GRIDS = {"cache_temperature": "interpolation_temperature", "cache_lambda": "lambda"}  # of a setting whose grid is another's
SAMPLE = 256  # validation queries on which an approximate index's recall is measured


class Tune(Artefact):
    """``tuned.json``: each row's best setting, and its loss over the grid."""

    kind, stage, format = "tune", "tune", 2

    def __init__(self, config: DictConfig, encoded: Encode, memories: Memories):
        super().__init__(config)
        self.encoded, self.memories = encoded, memories

    def needs(self) -> list[Artefact]:
        return [self.encoded, *self.memories.needs()]

    def settings(self) -> Any:
        collected = {"tokens": self.config.mixture.tokens} if self.fitted() else {}
        rows = [repr(row) for row in rows_of(self.config)]
        return {"rows": rows, "grid": plain(self.config.tune), **reading(self.config, self.memories), **collected}

    def fitted(self) -> list[FittedRow]:
        """The row whose mixture is fitted to what this pass collects, where there is one."""
        return [row for row in rows_of(self.config) if isinstance(row, FittedRow)]

    def searched(self) -> list[Row]:
        """The rows whose settings are searched on a grid."""
        return [row for row in rows_of(self.config) if isinstance(row, Row)]

    def build(self, folder: Path) -> None:
        meter, encoded = ResourceUsage(), self.encoded
        rows, fitted = self.searched(), self.fitted()
        scorer = scorer_of(self.config, [*rows, *fitted], self.memories, encoded)
        sums = [LossSums() for _ in rows]
        collected = [EvidenceCollector(row, parse_token_count(self.config.mixture.tokens)) for row in fitted]
        for window, masses in scorer.masses(with_progress(encoded, "tune")):
            for total, row, own in zip(sums, rows, masses, strict=False):
                total.add(window, row.score(window.vocabulary, own))
            for part in collected:
                part.add(window, masses[-1])
        for part in collected:
            part.save(folder, scorer.memories)
        found = [summarize_row(row, total) for row, total in zip(rows, sums, strict=True)]
        for one in found:
            one["at_edge"] = at_edge(one["tuned"], self.config.tune)
            for name in one["at_edge"]:
                key = GRIDS.get(name, name)
                best = f"{name}={one['tuned'][name]}"
                print(f"tune: {one['memories']}: {best} lies at the edge of the grid: widen tune.{key}")
        content = {"rows": found, "seconds": round(meter.seconds, 1), "peak_memory_mb": meter.peak_memory_mb}
        if external := scorer.memories.get("external"):
            assert isinstance(external, ExternalMemory)
            content["recall"] = recall(external.nearest, encoded.path())
        (folder / "tuned.json").write_text(json.dumps(content, indent=1))

    def tuned(self) -> dict[str, Any]:
        return self.read("tuned.json")

    def parts(self) -> list[Artefact]:
        """What the stage makes before this."""
        return []

    def of(self, row: int) -> Tune:
        """Return the pass whose settings count for a row."""
        return self

    def evidence(self) -> tuple[Evidence, dict[str, Any]]:
        """What was collected for the row that is fitted, and of which experts."""
        parts = load_file(self.path() / "evidence.safetensors")
        return Evidence(**parts), self.read("evidence.json")

    def rows(self) -> Sequence[Row | FittedRow]:
        """The rows at their best settings."""
        found = self.tuned()["rows"]
        return [row.at(one["tuned"]) for row, one in zip(self.searched(), found, strict=True)]


class EvidenceCollector:
    """What the experts of a row say of the tokens of valid, up to some number of tokens."""

    def __init__(self, row: FittedRow, limit: int | None):
        self.row, self.limit, self.held = row, limit, 0
        self.parts: list[Evidence] = []
        self.described: dict[str, Any] = {}

    def add(self, window: Window, masses: dict[str, Mass]) -> None:
        """Keep a window's."""
        if self.limit is not None and self.held >= self.limit:
            return
        found = {name: masses[name] for name in self.row.joint}
        self.parts.append(stack_evidence(window.vocabulary, found, window.query.place.document).cpu())
        self.held += len(window.query.token)
        self.described = {"experts": {name: mass.total.shape[1] for name, mass in found.items()}}

    def save(self, folder: Path, memories: dict[str, Memory]) -> None:
        """Write ``evidence.safetensors`` and ``evidence.json``."""
        experts = self.described["experts"]
        counts = [False, *(bool(memories[name].expert_names) for name, size in experts.items() for _ in range(size))]
        save_file(
            {name: part.contiguous() for name, part in concat_evidence(self.parts)._asdict().items()},
            folder / "evidence.safetensors",
        )
        (folder / "evidence.json").write_text(json.dumps(self.described | {"counts": counts}))


class LossSums:
    """Summed loss over the grid, and how many tokens it is of: of each document, or of few documents part by part.

    Parts are as short as STRETCH, and double whenever there are more than PARTS.
    """

    def __init__(self) -> None:
        self.stretch = PART_TOKENS
        self.found: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self.documents: set[int] = set()

    def add(self, window: Window, score: Float[Tensor, "s a n"]) -> None:
        key = int(window.contexts.place.document[0]), window.scored_from // self.stretch
        self.documents.add(key[0])
        self.put(key, -score.double().sum(-1).cpu(), score.shape[-1])
        if len(self.found) > MAX_PARTS and self.few:
            self.merge(2)

    def put(self, key: tuple[int, int], loss: Tensor, count: int) -> None:
        before, counted = self.found.get(key, (torch.zeros(()), 0))
        self.found[key] = before + loss, counted + count

    def merge(self, factor: int) -> None:
        """Parts that are so much longer."""
        before, self.found, self.stretch = self.found, {}, self.stretch * factor
        for (document, stretch), (loss, count) in before.items():
            self.put((document, stretch // factor), loss, count)

    @property
    def few(self) -> bool:
        return len(self.documents) < FEW_DOCUMENTS

    @property
    def total(self) -> Float[Tensor, "s a"]:
        return sum((loss for loss, _ in self.found.values()), torch.zeros(()))

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.found.values())

    def bootstrap_units(self, size: int, choice: int) -> tuple[str, list[list[float]]]:
        """What a bootstrap draws from, and of each its summed loss and tokens: documents; of few, parts of them."""
        units: dict[tuple[int, int], list[float]] = {}
        for (document, stretch), (loss, count) in self.found.items():
            own = units.setdefault((document, stretch if self.few else 0), [0.0, 0])
            own[0] += float(loss[size, choice])
            own[1] += count
        return f"parts of {self.stretch:,} tokens" if self.few else "documents", list(units.values())


def summarize_row(row: Row | FittedRow, sums: LossSums) -> dict[str, Any]:
    """The best choice of a row, its loss there, and the best loss at each memory size."""
    tokens = sums.tokens
    mean = sums.total / tokens
    best = int(mean.argmin())
    size, choice = divmod(best, mean.shape[1])
    tuned: dict[str, float] = dict(row.choices()[choice])
    curve = {}
    if "long" in row.memories:
        tuned["memory_size"] = row.sizes[size]
        curve = dict(zip(map(str, row.sizes), mean.min(1).values.tolist(), strict=True))
    loss = float(mean[size, choice])
    drawn, documents = sums.bootstrap_units(size, choice)
    return {
        "memories": row.label,
        "mixture": row.mixture,
        "tuned": tuned,
        "loss": loss,
        "perplexity": perplexity(loss),
        "tokens": tokens,
        "by_memory_size": curve,
        "documents": documents,
        "drawn": drawn,
    }


def at_edge(tuned: dict[str, float], grid: Any) -> list[str]:
    """Return the settings whose best value is the least or the largest of its grid, so that a better one may lie beyond.

    A grid of one or two values is a choice, not a range; the size of the long memory is what a row is about.
    """
    grids = {name: list(grid[GRIDS.get(name, name)]) for name in tuned if name != "memory_size"}
    return [name for name, values in grids.items() if len(values) > 2 and tuned[name] in (min(values), max(values))]


def recall(nearest: KNNMemory, folder: Path) -> dict[str, Any]:
    """The share of the exact K nearest that the index finds, over a sample of validation queries."""
    if nearest.search.kind == "exact":
        return {"recall": 1.0, "queries": 0}
    queries = sample_queries(folder)
    _, exact = ExactSearch(nearest.store.keys.blocks, nearest.metric).nearest(queries, nearest.k)
    _, found = nearest.search.nearest(queries, nearest.k)
    return {"recall": recall_of(exact, found), "queries": len(queries)}


def sample_queries(folder: Path) -> Float[Tensor, "n d"]:
    """Queries of an encoded split, evenly chosen."""
    queries = torch.cat([window.query.g for window in windows_of(folder, torch.device("cpu"))])
    return queries[:: max(1, len(queries) // SAMPLE)][:SAMPLE]


def reading(config: DictConfig, memories: Memories) -> dict[str, Any]:
    """What decides how memories are read."""
    index = {key: plain(config.index)[key] for key in ("k", "probe", "rescore")} if "external" in memories.names else {}
    return {
        "memories": memories.settings(),
        "jumps_clear": config.compatibility.sorted_windows,
        "scaled_interpolation": config.evaluate.scaled_interpolation,
        "index": index,
        "sampled": SAMPLE,
    }


def scorer_of(config: DictConfig, rows: Sequence[Row | FittedRow], memories: Memories, asked: Encode) -> Scorer:
    """The scorer with the memories that the rows name."""
    sizes = sorted({size for row in rows if "long" in row.memories for size in row.sizes})
    found = memories.opened(asked.information(), sizes, memory_names(rows))
    return Scorer(rows, found, config.evaluate.scaled_interpolation, config.compatibility.sorted_windows)


def with_progress(encoded: Encode, what: str) -> Iterator[Window]:
    """The windows of an encoded split under a progress bar."""
    folder = encoded.path()
    total = encoded.information()["tokens"]
    with tqdm(total=total, unit="tok", unit_scale=True, desc=f"{what} {encoded.split}", mininterval=1) as bar:
        for window in windows_of(folder, device_of(encoded.config)):
            yield window
            bar.update(len(window.vocabulary.total))
