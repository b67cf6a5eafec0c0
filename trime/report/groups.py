"""Runs that differ in their seed alone are one group; which groups can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from trime.report.command_lines import PLACES, words
from trime.report.tables import evaluated, measure, units

Run = dict[str, Any]
VOCABULARY = "vocabulary"  # the row without memory


class Group(NamedTuple):
    """Runs of one experiment, a seed each."""

    runs: list[Run]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def seeds(self) -> str:
        return ", ".join(str(run["seed"]) for run in self.runs)

    @property
    def row(self) -> dict[str, Any]:
        """The own (last) row on test of the first run."""
        return self.first["metrics"]["test"][-1]

    @property
    def dev(self) -> list[dict[str, Any]]:
        """The own row on dev of every run."""
        return [run["metrics"]["valid"][-1] for run in self.runs]

    @property
    def policy(self) -> str:
        """The eviction policy's name, without its settings."""
        return (self.row.get("eviction") or "").split(" ")[0]

    def figures(self, split: str, kind: str) -> list[float]:
        """Of the own row, seed by seed: BLEU if that is the ``kind``, else the measure of its loss."""
        rows = [run["metrics"][split][-1] for run in self.runs]
        return [row["bleu"] if kind == "BLEU" else measure(row) for row in rows]

    def mean(self, split: str, kind: str = "") -> float:
        """The figures' mean over seeds."""
        return float(np.mean(self.figures(split, kind)))

    def bleu(self, split: str) -> float | None:
        """BLEU of the own row, the mean over seeds; None where there is none."""
        return self.average(lambda run: run["metrics"][split][-1].get("bleu"))

    def average(self, found: Callable[[Run], float | None]) -> float | None:
        """Of what the runs have, its mean; None where none has it."""
        values = [value for run in self.runs if (value := found(run)) is not None]
        return float(np.mean(values)) if values else None


def by_mixture(runs: list[Run]) -> list[Run]:
    """Return each run as the papers have it and, where its last row's mixture was fitted, that row as a run of its own.

    A run whose other rows have no memory is its last row.
    """
    return [part for run in runs for part in ([papers_part(run), fitted_part(run)] if has_both(run) else [run])]


def has_both(run: Run) -> bool:
    """Whether a row of the papers with memory stands beside one whose mixture was fitted."""
    return is_fitted(run) and any(row["memories"] != VOCABULARY for row in papers_part(run)["metrics"]["test"])


def is_fitted(run: Run) -> bool:
    """Whether the last row's mixture was fitted, which the papers' are not."""
    return len(run["metrics"]["test"]) > 1 and "fitted" in run["metrics"]["valid"][-1]


def papers_part(run: Run) -> Run:
    """Return a run without its last row."""
    return run | {"metrics": {split: rows[:-1] for split, rows in run["metrics"].items()}}


def fitted_part(run: Run) -> Run:
    """Return a run as what its last row's mixture makes of it."""
    own = {"name": f"{run['name']}, {run['metrics']['test'][-1]['mixture']}"}
    return {key: value for key, value in run.items() if key != "analysis"} | own


def ranked(groups: list[Group]) -> tuple[str, list[Group]]:
    """The measure's name (BLEU where all translate), and the groups, worst first."""
    kind = "BLEU" if all("bleu" in group.row for group in groups) else units([group.first for group in groups])
    return kind, sorted(groups, key=lambda group: group.mean("test", kind), reverse=kind != "BLEU")


def grouped(runs: list[Run]) -> list[Group]:
    """Runs by all but the seed; what a run tuned does not part them, unless seeds would occur twice."""
    found = [runs]
    for key in (experiment, memory_size, model_of):
        found = [part for group in found for part in parted(group, key)]
    return [Group(sorted(group, key=lambda run: run["seed"])) for group in found]


def parted(runs: list[Run], key: Callable[[Run], Any]) -> list[list[Run]]:
    """The runs by a key; by it they are one group where seeds tell them apart already."""
    if key is not experiment and len({run["seed"] for run in runs}) == len(runs):
        return [runs]
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def experiment(run: Run) -> tuple[Any, ...]:
    row = run["metrics"]["test"][-1]
    own = run["name"], run["parameters"], run["train"].get("updates"), evaluated(run)
    return *own, row["memories"], row.get("eviction"), memory_size(run) if "memory_size" not in row["tuned"] else None


def memory_size(run: Run) -> int | tuple[int, ...] | None:
    """Return the entries of the memory that fills while text is read, or those of each layer where they differ."""
    size = run["metrics"]["test"][-1]["memory_size"]
    return tuple(size) if isinstance(size, list) else size


def size_text(size: int | tuple[int, ...]) -> str:
    """Return a memory size as tables print it: 2,048, or 512, 2,048 by layer."""
    return f"{size:,}" if isinstance(size, int) else f"{', '.join(f'{entries:,}' for entries in size)} by layer"


def model_of(run: Run) -> str:
    """What is left to tell runs apart."""
    return str(run.get("config_hash"))


def labels(groups: list[Group]) -> list[str]:
    """The groups' names; where some share one, with the words of their commands that set them apart."""
    own = [(group.first["name"], own_words(group)) for group in groups]
    alike = {name: [found for other, found in own if other == name] for name, _ in own}
    return [" ".join([name, *(w for w in found if any(w not in other for other in alike[name]))]) for name, found in own]


def own_words(group: Group) -> list[str]:
    """Of a group's command, what may decide its figures."""
    every = words(group.first.get("command"))[2:]
    return [word for word in every if not PLACES.match(word) and not word.startswith(("seed=", "report.", "logger", "hydra"))]


def opponent(group: Group, groups: list[Group], against: str) -> Group | None:
    """What a group is compared with: the experiment, or the policy at the same size, that ``against`` names."""
    others = [other for other in groups if comparable(group, other) and other is not group]
    if group.policy:
        same = [o for o in others if o.policy == against and o.first["name"] == group.first["name"] and sized(o, group)]
        if same:
            return same[0]
    named = [other for other in others if other.first["name"] == against]
    return min(named, key=lambda other: abs((other.first["parameters"] or 0) - (group.first["parameters"] or 0)), default=None)


def comparable(one: Group, other: Group) -> bool:
    """The same text, cut into the same documents, the same training budget, and seeds in common."""
    budgets = one.first["train"].get("updates"), other.first["train"].get("updates")
    same = evaluated(one.first) == evaluated(other.first)
    return same and budgets[0] == budgets[1] and bool(pairs(one, other))


def sized(one: Group, other: Group) -> bool:
    return memory_size(one.first) == memory_size(other.first)


def pairs(one: Group, other: Group) -> list[tuple[Run, Run]]:
    """Runs of the same seed whose losses are told for the same parts of the text."""
    by_seed = {run["seed"]: run for run in other.runs}
    found = [(run, by_seed[run["seed"]]) for run in one.runs if run["seed"] in by_seed]
    return [pair for pair in found if all(parts(run) == parts(found[0][0]) for run in pair)]


def parts(run: Run) -> list[float]:
    """Tokens of each document, or part of one, that a bootstrap draws."""
    return [count for _, count in documents(run)]


def documents(run: Run) -> list[list[float]]:
    """Summed loss and number of tokens of each document, in the own row on test."""
    return run["metrics"]["test"][-1]["documents"]
