"""Groups of runs that differ only in their seed, and which groups can be compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from trime.metrics import mean_over_seeds
from trime.report.command_lines import PATH_SETTINGS, split_command
from trime.report.tables import metric_name, metric_names, metric_value
from trime.report.texts import evaluated_text, is_trained, other_texts

Run = dict[str, Any]
VOCABULARY = "vocabulary"  # the name of the row without memory


class Group(NamedTuple):
    """Runs of one experiment, one for each seed."""

    runs: list[Run]

    @property
    def first(self) -> Run:
        """Return the run of the first seed."""
        return self.runs[0]

    @property
    def seeds(self) -> str:
        """Return the seeds, separated by commas."""
        return ", ".join(str(run["seed"]) for run in self.runs)

    @property
    def seeds_text(self) -> str:
        """Return the seeds as tables print them, or that none mattered."""
        if not is_trained(self.first) and "fitted" not in self.dev[0]:
            return "no seed: nothing was trained"
        return f"seed {self.seeds}" if len(self.runs) == 1 else f"{len(self.runs)} seeds: {self.seeds}"

    @property
    def row(self) -> dict[str, Any]:
        """Return the last row of the first run on test."""
        return self.first["metrics"]["test"][-1]

    @property
    def dev(self) -> list[dict[str, Any]]:
        """Return the last row of every run on dev."""
        return [run["metrics"]["valid"][-1] for run in self.runs]

    @property
    def policy(self) -> str:
        """Return the name of the eviction policy, without its settings."""
        return (self.row.get("eviction") or "").split(" ")[0]

    def values(self, split: str, metric: str) -> list[float]:
        """Return the last row's metric for each seed: BLEU if that is ``metric``, else perplexity or bits per character."""
        rows = [run["metrics"][split][-1] for run in self.runs]
        return [row["bleu"] if metric == "BLEU" else metric_value(row) for row in rows]

    def mean(self, split: str, metric: str = "") -> float:
        """Return the mean of a metric over seeds, by default of the row's own."""
        return mean_over_seeds(self.values(split, metric), metric if metric == "BLEU" else metric_name(self.row))

    def bleu(self, split: str) -> float | None:
        """Return the mean BLEU of the last row over seeds; None if it does not translate."""
        return self.average(lambda run: run["metrics"][split][-1].get("bleu"))

    def average(self, value_of: Callable[[Run], float | None]) -> float | None:
        """Return the mean of a value over the runs that have it; None if none has."""
        known = [value for run in self.runs if (value := value_of(run)) is not None]
        return float(np.mean(known)) if known else None

    def average_cell(self, name: str) -> float | None:
        """Return the mean of a value of the last row on test over the runs that have it; None if none has."""
        return self.average(lambda run: run["metrics"]["test"][-1].get(name))


def split_by_mixture(runs: list[Run]) -> list[Run]:
    """Split each run that has both into the papers' rows and, as a run of its own, its last row with the fitted mixture.

    A run whose other rows have no memory stays whole, represented by its last row.
    """
    return [part for run in runs for part in ([paper_part(run), fitted_part(run)] if has_paper_and_fitted_rows(run) else [run])]


def has_paper_and_fitted_rows(run: Run) -> bool:
    """Return True if a run has a row of the papers with memory beside one with a fitted mixture."""
    return is_fitted(run) and any(row["memories"] != VOCABULARY for row in paper_part(run)["metrics"]["test"])


def is_fitted(run: Run) -> bool:
    """Return True if the mixture of the last row was fitted, which those of the papers are not."""
    return len(run["metrics"]["test"]) > 1 and "fitted" in run["metrics"]["valid"][-1]


def paper_part(run: Run) -> Run:
    """Return a run without its last row."""
    return run | {"metrics": {split: rows[:-1] for split, rows in run["metrics"].items()}}


def fitted_part(run: Run) -> Run:
    """Return a run under the name of its last row's mixture, without the analysis, which stays with the papers' rows."""
    name = {"name": f"{run['name']}, {run['metrics']['test'][-1]['mixture']}"}
    return {key: value for key, value in run.items() if key != "analysis"} | name


def rank_groups(groups: list[Group]) -> tuple[str, list[Group]]:
    """Return the metric (BLEU if all groups translate), and the groups sorted by it, the worst first."""
    metric = "BLEU" if all("bleu" in group.row for group in groups) else metric_names([group.first for group in groups])
    lower_is_better = metric != "BLEU"
    worst = math.inf if lower_is_better else -math.inf

    def result(group: Group) -> float:
        value = group.mean("test", metric)
        return worst if math.isnan(value) else value

    return metric, sorted(groups, key=result, reverse=lower_is_better)


def group_runs(runs: list[Run]) -> list[Group]:
    """Group runs that differ only in their seed; what was tuned does not separate runs unless a seed would occur twice.

    The same seed run again is no further seed: such runs are groups of their own.
    """
    groups = split_by(runs, experiment_key)
    groups = [part for group in groups for part in split_by(group, settings_key(group))]
    for key in (memory_size, hash_of, made_at, id):
        groups = [part for group in groups for part in ([group] if seeds_differ(group) else split_by(group, key))]
    return [Group(sorted(group, key=lambda run: run["seed"])) for group in groups]


def seeds_differ(runs: list[Run]) -> bool:
    """Return whether every run has a seed of its own."""
    return len({run["seed"] for run in runs}) == len(runs)


def split_by(runs: list[Run], key: Callable[[Run], Any]) -> list[list[Run]]:
    """Split runs by a key, in the order in which its values occur."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def experiment_key(run: Run) -> tuple[Any, ...]:
    """Return what identifies an experiment: name, size, training, texts, memories, policy, and memory size unless tuned."""
    row = run["metrics"]["test"][-1]
    key = run["name"], run["parameters"], run["train"].get("updates"), evaluated_text(run), *other_texts(run).values()
    return *key, row["memories"], row.get("eviction"), memory_size(run) if "memory_size" not in row["tuned"] else None


def settings_key(runs: list[Run]) -> Callable[[Run], Any]:
    """Return the key by which runs of the same settings are found, also where versions of the code hashed them otherwise."""
    overrides: dict[str, tuple[str, ...]] = {}
    for run in runs:
        overrides.setdefault(hash_of(run), tuple(sorted(overrides_of(run))))
    return lambda run: overrides[hash_of(run)]


def memory_size(run: Run) -> int | tuple[int, ...] | None:
    """Return the capacity of the memory that fills while text is read, in entries; one number per layer if they differ."""
    size = run["metrics"]["test"][-1]["memory_size"]
    return tuple(size) if isinstance(size, list) else size


def size_text(size: int | tuple[int, ...]) -> str:
    """Return a memory size as tables print it: ``2,048``, or ``512, 2,048 by layer``."""
    return f"{size:,}" if isinstance(size, int) else f"{', '.join(f'{entries:,}' for entries in size)} by layer"


def hash_of(run: Run) -> str:
    """Return the hash of a run's configuration."""
    return str(run.get("config_hash"))


def made_at(run: Run) -> str:
    """Return the commit and the time at which a run was made."""
    return ", ".join(filter(None, [str(run.get("commit"))[:7], run.get("created")]))


def group_labels(groups: list[Group]) -> list[str]:
    """Return the groups' names; groups that share one also get what distinguishes them: overrides, texts, commit and time."""
    overrides = [(group.first["name"], [*overrides_of(group.first), *text_words(group.first)]) for group in groups]
    labels = []
    for name, words in overrides:
        namesakes = [others for other, others in overrides if other == name]
        labels.append(" ".join([name, *(word for word in words if any(word not in others for others in namesakes))]))
    count = Counter(labels)
    return [
        label if count[label] == 1 else f"{label} (made at {made_at(group.first)})"
        for label, group in zip(labels, groups, strict=True)
    ]


def text_words(run: Run) -> list[str]:
    """Return which texts a model learned from and its datastore holds, for runs that differ in them."""
    words = {"trained on": "trained on" if is_trained(run) else "not trained, vocabulary of"}
    return [f"({f'{words.get(what, what)} {name} {text[:4]}'.rstrip()})" for what, (name, text) in other_texts(run).items()]


def overrides_of(run: Run) -> list[str]:
    """Return the overrides of a run's command that may affect its results."""
    words = split_command(run.get("command"))
    words = words[1:] if words[:1] == ["trime"] else words[2:]  # without the program: trime, or python cli.py
    irrelevant = ("seed=", "report.", "logger", "hydra")
    return [word for word in words if not PATH_SETTINGS.match(word) and not word.startswith(irrelevant)]


def baseline_of(group: Group, groups: list[Group], name: str) -> Group | None:
    """Return the group to compare with: the policy ``name`` at the same memory size, or the experiment ``name``; or None."""
    others = [other for other in groups if comparable(group, other) and other is not group]
    if group.policy:
        for other in others:
            same_memory = other.first["name"] == group.first["name"] and memory_size(other.first) == memory_size(group.first)
            if other.policy == name and same_memory:
                return other
    named = [other for other in others if other.first["name"] == name]
    return min(named, key=lambda other: abs((other.first["parameters"] or 0) - (group.first["parameters"] or 0)), default=None)


def comparable(one: Group, other: Group) -> bool:
    """Return True if two groups have the same text in the same documents, the same training budget, and seeds in common."""
    budgets = one.first["train"].get("updates"), other.first["train"].get("updates")
    same_text = evaluated_text(one.first) == evaluated_text(other.first)
    return same_text and budgets[0] == budgets[1] and bool(seed_pairs(one, other))


def seed_pairs(one: Group, other: Group) -> list[tuple[Run, Run]]:
    """Return the pairs of runs with the same seed whose losses were recorded for the same parts of the text."""
    by_seed = {run["seed"]: run for run in other.runs}
    pairs = [(run, by_seed[run["seed"]]) for run in one.runs if run["seed"] in by_seed]
    return [pair for pair in pairs if all(part_tokens(run) == part_tokens(pairs[0][0]) for run in pair)]


def part_tokens(run: Run) -> list[float]:
    """Return the number of tokens of each document, or part of one, that the bootstrap resamples."""
    return [count for _, count in document_losses(run)]


def document_losses(run: Run) -> list[list[float]]:
    """Return the summed loss and the number of tokens of each document, for the last row on test."""
    return run["metrics"]["test"][-1]["documents"]
