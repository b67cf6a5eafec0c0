"""subsets: a fitted mixture over subsets of its memories, each fitted anew on valid, and what each memory costs and gives.

Nothing is trained: what the memories said of valid is there, and one pass over test scores every subset.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.evaluation.fitted_rows import FittedRow, FittedScorer
from trime.evaluation.frequency import dev_frequency
from trime.evaluation.memory_cost import MeteredMemory, now
from trime.evaluation.rows import Row
from trime.memory.external import ExternalMemory
from trime.mixtures.experts import Evidence
from trime.pipeline.artefact import Artefact
from trime.stages.analysis.weights import Weights, bins_of
from trime.stages.encode import Encode
from trime.stages.evaluate import describe_search
from trime.stages.mixture import TuneMixture, fitted, sum_by_document
from trime.stages.tune import LossSums, scorer_of, summarize_row, with_progress


class Subsets(Artefact):
    """``subsets.json``; the last of its subsets is of all memories."""

    kind, stage = "subsets", "evaluate"

    def __init__(self, config: DictConfig, encoded: Encode, tune: TuneMixture):
        super().__init__(config)
        self.encoded, self.tune = encoded, tune

    def needs(self) -> list[Artefact]:
        return [self.encoded, self.tune]

    def settings(self) -> Any:
        return {"subsets": self.config.evaluate.subsets}

    def build(self, folder: Path) -> None:
        evidence, described = self.tune.grid.evidence()
        corpus, whole = self.encoded.corpus.corpus(), self.tune.row()
        rows, dev = self.rows(evidence, described)
        scorer = scorer_of(self.config, rows, self.tune.memories, self.encoded)
        weights = Weights(bins_of(evidence, described["experts"], scorer.memories), len(corpus.vocabulary))
        meters = {name: MeteredMemory(scorer.memories[name]) for name in whole.joint}
        external = scorer.memories.get("external")
        searched = None
        if isinstance(external, ExternalMemory):
            searched = describe_search(scorer.memories) | {"keys": external.nearest.store.keys.dtype}
        scorer.memories = {**meters}
        readings, sums, seconds = [row.window_scorer() for row in rows], [LossSums() for _ in rows], [0.0 for _ in rows]
        every = readings[-1]
        assert isinstance(every, FittedScorer)
        for window, masses in scorer.masses(with_progress(self.encoded, "subsets")):
            for number, (reading, own) in enumerate(zip(readings, masses, strict=True)):
                started = now()
                score = reading(window, own)
                seconds[number] += now() - started
                sums[number].add(window, score)
            weights.add(window.query.token, every.evidence.total, every.log_weights)
        tokens = sums[-1].tokens
        costs = {name: {"bytes": meter.bytes, "seconds_per_token": meter.seconds / tokens} for name, meter in meters.items()}
        content = {
            "mixture": whole.kind,
            "which": self.config.evaluate.subsets,
            "external": searched,
            "encode_seconds_per_token": self.encoded.information()["seconds"] / tokens,
            "memories": costs,
            "weights": weights.summary(dev_frequency(corpus)),
            "subsets": [
                subset_result(row, dev_loss, total, own / tokens)
                for row, dev_loss, total, own in zip(rows, dev, sums, seconds, strict=True)
            ],
        }
        (folder / "subsets.json").write_text(json.dumps(content, indent=1))

    def rows(self, evidence: Evidence, described: dict[str, Any]) -> tuple[list[Row | FittedRow], list[float]]:
        """Return the row of each subset, and its loss on documents of valid that its fit did not see."""
        whole, rows, losses = self.tune.row(), [], []
        for names in subsets(whole.joint, self.config.evaluate.subsets):
            if names == whole.joint:
                rows.append(self.tune.rows()[-1])
                losses.append(self.tune.information()["row"]["loss"])
                continue
            if not names:
                rows.append(Row((), ()))
                losses.append(-float(evidence.log_probability[:, 0].double().mean()))
                continue
            mixture, score = fitted(self.config, *select_memories(evidence, described, names))
            sizes = whole.sizes if "long" in names else Row.sizes
            rows.append(replace(whole, joint=names, sizes=sizes, fitted=mixture))
            losses.append(summarize_row(rows[-1], sum_by_document(evidence.document, -score))["loss"])
        return rows, losses

    def results(self) -> dict[str, Any]:
        return self.read("subsets.json")


def subset_result(row: Row | FittedRow, dev: float, sums: LossSums, seconds: float) -> dict[str, Any]:
    """Return what was found of a subset."""
    own = summarize_row(row, sums)
    kept = {key: own[key] for key in ("loss", "tokens", "documents", "drawn")}
    return {"memories": list(row.joint), "dev_loss": dev, **kept, "seconds_per_token": seconds}


def subsets(names: tuple[str, ...], which: str) -> list[tuple[str, ...]]:
    """Return the subsets that evaluate.subsets names, in the memories' order, the largest last."""
    sizes: Sequence[int] = range(len(names)) if which == "all" else [len(names) - 1]
    return [*(own for size in sizes for own in combinations(names, size)), names]


def select_memories(evidence: Evidence, described: dict[str, Any], names: tuple[str, ...]) -> tuple[Evidence, dict[str, Any]]:
    """Return the evidence of some memories beside the vocabulary's, and its description."""
    columns, first = [0], 1
    for name, size in described["experts"].items():
        columns += range(first, first + size) if name in names else []
        first += size
    experts = {name: size for name, size in described["experts"].items() if name in names}
    own = Evidence(evidence.target[:, columns].contiguous(), evidence.total[:, columns].contiguous(), evidence.document)
    return own, {"experts": experts, "counts": [described["counts"][column] for column in columns]}
