"""evaluate: scores the test split once with the tuned settings, each row in its own pass to measure speed and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.evaluation.fitted_mixture_spec import FittedMixtureSpec
from trime.evaluation.frequency import TokenMeans, dev_frequency
from trime.evaluation.loss_sums import LossSums, summarize_row
from trime.evaluation.mixture_spec import MixtureSpec
from trime.io import plain, write_atomically
from trime.memory.base import Memory
from trime.memory.external import ExternalMemory
from trime.metrics import ResourceUsage
from trime.pipeline.artefact import Artefact
from trime.pipeline.model_io import memory_settings
from trime.stages.encode import Encode
from trime.stages.tune import SCORING, TunedRows, build_scorer, with_progress


class TestResults(Artefact):
    """The results of every row on the test split: ``rows.json``."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the results of every row."""
        return self.read("rows.json")


class Evaluate(TestResults):
    """Loss and perplexity of every row on the test split: ``rows.json``."""

    kind, format = "evaluate", 5
    depends_on, unhashed = SCORING, ("model", "eviction")

    def __init__(self, config: DictConfig, encoded: Encode, tune: TunedRows):
        super().__init__(config)
        self.encoded, self.tune = encoded, tune

    def needs(self) -> list[Artefact]:
        return [self.encoded, self.tune]

    def settings(self) -> Any:
        return super().settings() | {"memory": memory_settings(self.config)}  # the table names it

    def build(self, folder: Path) -> None:
        results = [self.evaluate_row(number, row, folder / f"row-{number}.json") for number, row in enumerate(self.tune.rows())]
        (folder / "rows.json").write_text(json.dumps(results, indent=1))

    def evaluate_row(self, number: int, row: MixtureSpec | FittedMixtureSpec, file: Path) -> dict[str, Any]:
        """Return the results of one row over the whole split; a killed run finds them in ``file`` and resumes after it."""
        if file.exists():
            return json.loads(file.read_text())
        corpus, score_window = self.encoded.corpus.corpus(), row.window_scorer()
        memories = self.tune.for_row(number).memories
        scorer = build_scorer(self.config, [row], memories, self.encoded)  # before the clock starts: it may open an index
        meter, sums, shares = ResourceUsage(), LossSums(), TokenMeans(len(corpus.vocabulary))
        for window, (masses,) in scorer.masses(with_progress(self.encoded, row.label)):
            score = score_window(window, masses)
            sums.add(window, score)
            if row.memories:
                of_vocabulary = score_window.vocabulary_log_prob(window, masses)
                shares.add(window.query.token, 1 - (of_vocabulary - score)[0, 0].double().exp())
        result = summarize_row(row, sums)
        if row.memories:  # the share of P(target) that comes from memories
            result["memory_share"] = shares.buckets(dev_frequency(corpus))
        information = self.encoded.summary()
        seconds = meter.seconds + information["seconds"]
        result |= {
            **describe_search(scorer.memories),
            **self.memory_limits(result["tuned"].get("memory_size")),
            "tokens_per_second": round(result["tokens"] / max(seconds, 1e-9), 1),
            "peak_memory_mb": max(meter.peak_memory_mb, information["peak_memory_mb"]),
        }
        write_atomically(file, json.dumps(result))
        return result

    def memory_limits(self, long: int | None) -> dict[str, Any]:
        """Return size and eviction policy of the long memory, or else of the memory inside the model."""
        inside = plain(self.config.model.get("memory_size"))
        second = {"model_memory_size": inside} if long and inside else {}
        size = long or inside
        return {"memory_size": size, "eviction": policy_name(plain(self.config.eviction)) if size else None} | second


def describe_search(memories: Mapping[str, Memory]) -> dict[str, Any]:
    """Return how the external memory is searched, and for how many entries."""
    external = memories.get("external")
    nearest = external.nearest if isinstance(external, ExternalMemory) else None
    return {"search": nearest.kind if nearest else None, "k": nearest.k if nearest else None}


def policy_name(policy: dict[str, Any]) -> str:
    """Return a policy's name and main settings: ``lra_sum c=2``, ``lfa c=1 gamma=0.05``, ``lru top_k=32``."""
    settings = {"c": (policy.get("initial") or {}).get("c")} | {key: policy.get(key) for key in ("gamma", "sinks", "top_k")}
    words = [f"{key}={value:g}" for key, value in settings.items() if value is not None]
    return " ".join([str(policy["_target_"]).split(".")[-2], *words])
