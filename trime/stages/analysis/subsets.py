"""Artefact of stage evaluate: refits a mixture on subsets of its memories, to measure what each memory costs and gains.

The model is not needed: the masses on valid are stored already, and one pass over test scores every subset.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.evaluation.fitted_mixture_spec import FittedMixtureSpec, FittedScorer
from trime.evaluation.frequency import dev_frequency
from trime.evaluation.loss_sums import LossSums, summarize_row
from trime.evaluation.memory_cost import MeteredMemory, now
from trime.evaluation.mixture_spec import MixtureSpec
from trime.memory.external import ExternalMemory
from trime.mixtures.experts import ExpertMasses
from trime.pipeline.artefact import Artefact
from trime.progress import Progress
from trime.stages.analysis.weights import Weights, bins_of
from trime.stages.encode import Encode
from trime.stages.evaluate import describe_search
from trime.stages.mixture import TuneMixture, fit_mixture, sum_by_document
from trime.stages.scoring import SCORING, build_scorer, with_progress


class Subsets(Artefact):
    """Losses of subsets of a mixture's memories: ``subsets.json``; the last subset has all memories."""

    kind, stage, format = "subsets", "evaluate", 2
    summary_file = "subsets.json"
    depends_on, unhashed = ("evaluate.subsets", "mixture", "seed", *SCORING), ("mixture.path",)

    def __init__(self, config: DictConfig, encoded: Encode, tune: TuneMixture):
        super().__init__(config)
        self.encoded, self.tune = encoded, tune

    def needs(self) -> list[Artefact]:
        return [self.encoded, self.tune]

    def build(self, folder: Path) -> None:
        expert_masses, description = self.tune.grid.expert_masses()
        corpus, full_row = self.encoded.corpus.corpus(), self.tune.row()
        rows, valid_losses = self.rows(expert_masses, description)
        scorer = build_scorer(self.config, rows, self.tune.memories, self.encoded)
        weights = Weights(bins_of(expert_masses, description["experts"], scorer.memories), len(corpus.vocabulary))
        meters = {name: MeteredMemory(scorer.memories[name]) for name in full_row.memory_order}
        external = scorer.memories.get("external")
        search = None
        if isinstance(external, ExternalMemory):
            search = describe_search(scorer.memories) | {"keys": external.nearest.store.keys.dtype}
        scorer.memories = {**meters}
        scorers, sums, seconds = [row.window_scorer() for row in rows], [LossSums() for _ in rows], [0.0 for _ in rows]
        full_scorer = scorers[-1]
        assert isinstance(full_scorer, FittedScorer)
        for window, masses in scorer.masses(with_progress(self.encoded, "subsets")):
            for number, (score_window, row_masses) in enumerate(zip(scorers, masses, strict=True)):
                started = now()
                score = score_window(window, row_masses)
                seconds[number] += now() - started
                sums[number].add(window, score)
            weights.add(window.query.token, full_scorer.expert_masses.total, full_scorer.log_weights)
        tokens = sums[-1].tokens
        costs = {name: {"bytes": meter.bytes, "seconds_per_token": meter.seconds / tokens} for name, meter in meters.items()}
        content = {
            "mixture": full_row.kind,
            "selection": self.config.evaluate.subsets,
            "external_search": search,
            "encode_seconds_per_token": self.encoded.summary()["seconds"] / tokens,
            "costs": costs,
            "weights": weights.summary(dev_frequency(corpus)),
            "subsets": [
                subset_result(row, valid_loss, row_sums, row_seconds / tokens)
                for row, valid_loss, row_sums, row_seconds in zip(rows, valid_losses, sums, seconds, strict=True)
            ],
        }
        (folder / "subsets.json").write_text(json.dumps(content, indent=1))

    def rows(
        self, masses: ExpertMasses, description: dict[str, Any]
    ) -> tuple[list[MixtureSpec | FittedMixtureSpec], list[float]]:
        """Return the row of each subset, and its cross-fitted loss on valid."""
        full_row, rows, losses = self.tune.row(), [], []
        chosen = subsets(full_row.memory_order, self.config.evaluate.subsets)
        for names in Progress(chosen, unit="subset", desc="fit subsets"):
            if names == full_row.memory_order:
                rows.append(self.tune.rows()[-1])
                losses.append(self.tune.summary()["row"]["loss"])
                continue
            if not names:
                rows.append(MixtureSpec((), ()))
                losses.append(-float(masses.log_probability[:, 0].double().mean()))
                continue
            mixture, score = fit_mixture(self.config, *select_memories(masses, description, names))
            sizes = full_row.sizes if "long" in names else MixtureSpec.sizes
            rows.append(replace(full_row, memory_order=names, sizes=sizes, fitted=mixture))
            losses.append(summarize_row(rows[-1], sum_by_document(masses.document, -score))["loss"])
        return rows, losses


def subset_result(row: MixtureSpec | FittedMixtureSpec, dev: float, sums: LossSums, seconds: float) -> dict[str, Any]:
    """Return the results of a subset, with its loss on dev and its seconds per token."""
    summary = summarize_row(row, sums)
    test = {key: summary[key] for key in ("loss", "tokens", "documents", "bootstrap_unit")}
    return {
        "memories": list(row.memory_order) if isinstance(row, FittedMixtureSpec) else [],
        "valid_loss": dev,
        **test,
        "seconds_per_token": seconds,
    }


def subsets(names: tuple[str, ...], which: str) -> list[tuple[str, ...]]:
    """Return the subsets that ``which`` asks for (all, leave_one_out), in the order of memories, the full set last."""
    sizes: Sequence[int] = range(len(names)) if which == "all" else [len(names) - 1]
    return [*(subset for size in sizes for subset in combinations(names, size)), names]


def select_memories(
    masses: ExpertMasses, description: dict[str, Any], names: tuple[str, ...]
) -> tuple[ExpertMasses, dict[str, Any]]:
    """Return the masses of the vocabulary and of some memories, and its description."""
    columns, first = [0], 1
    for name, size in description["experts"].items():
        columns += range(first, first + size) if name in names else []
        first += size
    experts = {name: size for name, size in description["experts"].items() if name in names}
    selected = ExpertMasses(masses.target[:, columns].contiguous(), masses.total[:, columns].contiguous(), masses.document)
    return selected, {"experts": experts, "counts": [description["counts"][column] for column in columns]}
