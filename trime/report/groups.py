"""Groups of runs that differ only in their seed, and which groups can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from trime.common.metrics import mean_over_seeds
from trime.report.run_result import VOCABULARY, MemorySize, Row, ScoredRun


class Group(NamedTuple):
    """Runs of one experiment, one for each seed."""

    runs: list[ScoredRun]

    @property
    def first(self) -> ScoredRun:
        return self.runs[0]

    @property
    def name(self) -> str:
        return self.first.name

    @property
    def seeds(self) -> str:
        """Return the seeds as tables print them, or that none mattered."""
        if not self.first.is_trained and self.first.dev.fitted is None:
            return "no seed: nothing was trained"
        count, seeds = len(self.runs), ", ".join(str(run.seed) for run in self.runs)
        return f"seed {seeds}" if count == 1 else f"{count} seeds: {seeds}"

    @property
    def row(self) -> Row:
        return self.first.row

    @property
    def dev(self) -> list[Row]:  # the same of every seed, on dev
        return [run.dev for run in self.runs]

    @property
    def policy(self) -> str:  # without its settings
        return (self.row.eviction or "").split(" ")[0]

    def values(self, split: str, metric: str) -> list[float]:
        """Return the last row's metric for each seed: BLEU if that is ``metric``, else perplexity or bits per character."""
        rows = [run.metrics[split][-1] for run in self.runs]
        return [row.bleu if metric == "BLEU" and row.bleu is not None else row.value for row in rows]

    def mean(self, split: str, metric: str = "") -> float:
        """Return the mean of a metric over seeds, by default of the row's own."""
        return mean_over_seeds(self.values(split, metric), metric if metric == "BLEU" else self.row.metric_name)

    def average(self, value_of: Callable[[ScoredRun], float | None]) -> float | None:
        """Return the mean of a value over the runs that have it; None if none has."""
        known = [value for run in self.runs if (value := value_of(run)) is not None]
        return float(np.mean(known)) if known else None


def split_by_mixture(runs: list[ScoredRun]) -> list[ScoredRun]:
    """Split each run that has both into the papers' rows and, as a run of its own, its last row with the fitted mixture."""
    found = []
    for run in runs:
        # A run whose other rows have no memory stays whole. The analysis is of the papers' rows.
        if run.is_fitted and any(row.memories != VOCABULARY for row in run.metrics["test"][:-1]):
            found.append(run.model_copy(update={"metrics": {split: rows[:-1] for split, rows in run.metrics.items()}}))
            run = run.model_copy(update={"name": f"{run.name}, {run.row.mixture}", "analysis": {}})
        found.append(run)
    return found


def metric_names(runs: list[ScoredRun]) -> str:
    """Return the metrics of several runs, as in ``perplexity or bits/char``."""
    return " or ".join(sorted({run.row.metric_name for run in runs}, reverse=True))


def rank_groups(groups: list[Group], split: str = "test") -> tuple[str, list[Group]]:
    """Return the metric (BLEU if all groups translate), and the groups sorted by it on a split, the best first."""
    translate = all(group.row.bleu is not None for group in groups)
    metric = "BLEU" if translate else metric_names([group.first for group in groups])
    worst = -math.inf if translate else math.inf  # stands for NaN, which has no order
    means = {id(group): group.mean(split, metric) for group in groups}
    rank = {name: worst if math.isnan(value) else value for name, value in means.items()}
    return metric, sorted(groups, key=lambda group: rank[id(group)], reverse=translate)


def group_runs(runs: list[ScoredRun]) -> list[Group]:
    """Group runs that differ only in their seed; tuned settings do not separate runs unless a seed would occur twice."""
    # Versions of the code hash settings differently: equal commands count as equal settings.
    settings: dict[tuple[Any, str | None], list[str]] = {}
    for run in runs:
        settings.setdefault((experiment_key(run), run.config_hash), sorted(run.settings))
    groups = split_by(runs, lambda run: (key := experiment_key(run), *settings[key, run.config_hash]))
    for further in (attrgetter("row.memory_size"), attrgetter("config_hash"), attrgetter("made_at"), id):
        # A group in which every run has its own seed is complete; the others are split by one more fact.
        split = [[group] if len({run.seed for run in group}) == len(group) else split_by(group, further) for group in groups]
        groups = [group for part in split for group in part]
    return [Group(sorted(group, key=lambda run: run.seed)) for group in groups]


def split_by(runs: list[ScoredRun], key: Callable[[ScoredRun], Any]) -> list[list[ScoredRun]]:
    groups: dict[Any, list[ScoredRun]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def experiment_key(run: ScoredRun) -> tuple[Any, ...]:
    """Return the identity of an experiment: name, size, training, texts, memories, policy, and memory size unless tuned."""
    size = None if "memory_size" in run.row.tuned else run.row.memory_size
    about = run.name, run.parameters, run.train.updates, run.text, *run.other_texts.values()
    return *about, run.row.memories, run.row.eviction, size


def size_text(size: MemorySize) -> str:
    """Return a memory size as tables print it: ``2,048``, or ``512, 2,048 by layer``."""
    return f"{size:,}" if isinstance(size, int) else f"{', '.join(f'{entries:,}' for entries in size)} by layer"


def group_labels(groups: list[Group]) -> list[str]:
    """Return the groups' names; groups that share one are told apart by settings, texts, commit and time."""
    described = []
    for run in (group.first for group in groups):
        uses = {} if run.is_trained else {"trained on": "not trained, vocabulary of"}
        texts = [f"({f'{uses.get(use, use)} {name} {text[:4]}'.rstrip()})" for use, (name, text) in run.other_texts.items()]
        described.append((run.name, [*run.settings, *texts]))
    labels = []
    for name, words in described:
        namesakes = [others for other, others in described if other == name]
        labels.append(" ".join([name, *(word for word in words if any(word not in others for others in namesakes))]))
    made = [group.first.made_at for group in groups]
    return [label if labels.count(label) == 1 else f"{label} (made at {at})" for label, at in zip(labels, made, strict=True)]


def baseline_of(group: Group, groups: list[Group], name: str) -> Group | None:
    """Return the group to compare with: the policy ``name`` at the same memory size, or the experiment ``name``; or None."""
    others = [other for other in groups if comparable(group, other) and other is not group]
    for other in others if group.policy else []:
        if (other.policy, other.name, other.row.memory_size) == (name, group.name, group.row.memory_size):
            return other
    # Of several runs of that name, the one whose model is closest in size is the fair opponent.
    named = [other for other in others if other.name == name]
    return min(named, key=lambda other: abs((other.first.parameters or 0) - (group.first.parameters or 0)), default=None)


def comparable(one: Group, other: Group) -> bool:
    """Return True if two groups have the same text in the same documents, the same training budget, and seeds in common."""
    facts = [(group.first.text, group.first.train.updates) for group in (one, other)]
    return facts[0] == facts[1] and bool(seed_pairs(one, other))


def seed_pairs(one: Group, other: Group) -> list[tuple[ScoredRun, ScoredRun]]:
    """Return the pairs of runs with the same seed whose losses were recorded for the same parts of the text."""
    by_seed = {run.seed: run for run in other.runs}
    pairs = [(run, by_seed[run.seed]) for run in one.runs if run.seed in by_seed]
    # A difference is paired: both sides must have scored the same documents, token for token.
    tokens = [[[count for _, count in run.row.documents] for run in pair] for pair in pairs]
    return [pair for pair, (mine, theirs) in zip(pairs, tokens, strict=True) if mine == theirs == tokens[0][0]]
