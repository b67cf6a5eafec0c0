"""evaluate: the test split, once, with what tune chose; each row in a pass of its own, for its speed and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.evaluation.fitted_rows import FittedRow
from trime.evaluation.frequency import TokenMeans, dev_frequency
from trime.evaluation.rows import Row
from trime.io import plain, write_atomically
from trime.memory.base import Memory
from trime.memory.external import ExternalMemory
from trime.metrics import ResourceUsage
from trime.pipeline.artefact import Artefact
from trime.stages.encode import Encode
from trime.stages.tune import LossSums, Tune, scorer_of, summarize_row, with_progress


class Evaluate(Artefact):
    """``rows.json``: loss and perplexity of every row on test."""

    kind, stage, format = "evaluate", "evaluate", 3

    def __init__(self, config: DictConfig, encoded: Encode, tune: Tune):
        super().__init__(config)
        self.encoded, self.tune = encoded, tune

    def needs(self) -> list[Artefact]:
        return [self.encoded, self.tune]

    def settings(self) -> Any:
        return {}

    def build(self, folder: Path) -> None:
        results = [self.row(number, row, folder / f"row-{number}.json") for number, row in enumerate(self.tune.rows())]
        (folder / "rows.json").write_text(json.dumps(results, indent=1))

    def row(self, number: int, row: Row | FittedRow, aside: Path) -> dict[str, Any]:
        """One row over the whole split; kept aside, so that a killed run goes on with the next row."""
        if aside.exists():
            return json.loads(aside.read_text())
        corpus, reading = self.encoded.corpus.corpus(), row.window_scorer()
        memories = self.tune.of(number).memories
        scorer = scorer_of(self.config, [row], memories, self.encoded)  # opening an index is no token's time
        meter, sums, shares = ResourceUsage(), LossSums(), TokenMeans(len(corpus.vocabulary))
        for window, (masses,) in scorer.masses(with_progress(self.encoded, row.label)):
            score = reading(window, masses)
            sums.add(window, score)
            if row.memories:
                part = reading.vocabulary_log_prob(window, masses)
                shares.add(window.query.token, 1 - (part - score)[0, 0].double().exp())
        found = summarize_row(row, sums)
        if row.memories:  # the share of P(target) that memories give
            found["memory_share"] = shares.buckets(dev_frequency(corpus))
        information = self.encoded.information()
        seconds = meter.seconds + information["seconds"]
        found |= {
            **describe_search(scorer.memories),
            **self.kept(found["tuned"].get("memory_size")),
            "tokens_per_second": round(found["tokens"] / max(seconds, 1e-9), 1),
            "peak_memory_mb": max(meter.peak_memory_mb, information["peak_memory_mb"]),
        }
        write_atomically(aside, json.dumps(found))
        return found

    def kept(self, long: int | None) -> dict[str, Any]:
        """Size and policy of the memory that fills while text is read: the long one, or that inside the model."""
        inside = plain(self.config.model.get("memory_size"))
        both = {"memory_size_inside": inside} if long and inside else {}
        size = long or inside
        return {"memory_size": size, "eviction": policy_name(plain(self.config.eviction)) if size else None} | both

    def rows(self) -> list[dict[str, Any]]:
        return self.read("rows.json")


def describe_search(memories: Mapping[str, Memory]) -> dict[str, Any]:
    """How the external memory was searched, and for how many entries."""
    external = memories.get("external")
    nearest = external.nearest if isinstance(external, ExternalMemory) else None
    return {"search": nearest.kind if nearest else None, "k": nearest.k if nearest else None}


def policy_name(policy: dict[str, Any]) -> str:
    """A policy by its file's name, and the settings that most depends on: lra_sum c=2, lfa c=1 gamma=0.05, lru top_k=32."""
    settings = {"c": (policy.get("initial") or {}).get("c")} | {key: policy.get(key) for key in ("gamma", "sinks", "top_k")}
    told = [f"{key}={value:g}" for key, value in settings.items() if value is not None]
    return " ".join([str(policy["_target_"]).split(".")[-2], *told])
