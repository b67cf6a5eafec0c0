"""Runs side by side: those that differ in their seed alone are one group; differences come with an interval.

Intervals are of the paired difference, by bootstrap over documents and seeds: a draw takes as many of both,
with replacement, for both sides alike. Where there are few documents, such as one stream, it draws parts of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from trime.metrics import MEASURES
from trime.stages.report.tables import Lines, evaluated, measure, unit, units

DRAWS = 10_000
Run = dict[str, Any]


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
    def policy(self) -> str:
        """The eviction policy's name, without its settings."""
        return (self.row.get("eviction") or "").split(" ")[0]

    def mean(self, split: str) -> float:
        """The measure of the own row, its mean over seeds."""
        return float(np.mean([measure(run["metrics"][split][-1]) for run in self.runs]))

    def bleu(self, split: str) -> str:
        """BLEU of the own row, the mean over seeds; nothing where there is none."""
        return figure(self.average(lambda run: run["metrics"][split][-1].get("bleu")), ".2f")

    def average(self, found: Callable[[Run], float | None]) -> float | None:
        """Of what the runs have, its mean; None where none has it."""
        values = [value for run in self.runs if (value := found(run)) is not None]
        return float(np.mean(values)) if values else None


class Difference(NamedTuple):
    """Of a measure: the first side's less the other's, with the interval that holds 95 % of the draws.

    Of one part and one seed there is nothing to draw from: the interval is NaN.
    """

    value: float
    low: float
    high: float

    @property
    def interval(self) -> str:
        return "one part, one seed: no interval" if math.isnan(self.low) else f"[{self.low:+.2f}, {self.high:+.2f}]"

    @property
    def shown(self) -> bool:
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.value:+.2f} {self.interval}" + ("" if self.shown or math.isnan(self.low) else " no difference shown")


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


def memory_size(run: Run) -> int | None:
    return run["metrics"]["test"][-1]["memory_size"]


def model_of(run: Run) -> str:
    """What is left to tell runs apart."""
    return str(run.get("config_hash"))


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


def difference(one: Group, other: Group) -> Difference:
    """Of the own rows on test, over the seeds that both have."""
    both = pairs(one, other)
    sides = np.array([[documents(run) for run in pair] for pair in both])  # [seeds, 2, documents, (loss, tokens)]
    seeds, _, count, _ = sides.shape
    draw = np.random.default_rng(0)
    of_seeds, of_documents = (draw.multinomial(n, np.full(n, 1 / n), DRAWS) for n in (seeds, count))
    sums = np.einsum("rs,spdx,rd->rpx", of_seeds, sides, of_documents)
    measured = np.vectorize(MEASURES[unit(one.row)])
    drawn = measured(sums[..., 0] / sums[..., 1])
    low, high = np.percentile(drawn[:, 0] - drawn[:, 1], [2.5, 97.5]) if seeds * count > 1 else (math.nan, math.nan)
    whole = sides.sum((0, 2))
    value = measured(whole[:, 0] / whole[:, 1])
    return Difference(float(value[0] - value[1]), float(low), float(high))


def bleu_of(sums: np.ndarray) -> np.ndarray:
    """Corpus BLEU (Papineni et al. 2002) of summed statistics [... 10]: n-grams that match, all, length, the reference's."""
    match, every, own, reference = sums[..., :4], sums[..., 4:8], sums[..., 8], sums[..., 9]
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.log(match / every).mean(-1)
        score = np.exp(np.nan_to_num(precision, nan=-np.inf, neginf=-np.inf) + np.minimum(0, 1 - reference / own))
    return np.asarray(100 * score)


def bleu_difference(one: Group, other: Group) -> Difference | None:
    """Of the mean BLEU over seeds, by paired bootstrap over sentences (Koehn 2004) and seeds; None where it was not kept."""
    kept = [[run["metrics"]["test"][-1].get("bleu_statistics") for run in pair] for pair in pairs(one, other)]
    if not all(side for pair in kept for side in pair):
        return None
    sides = np.array(kept, dtype=float)  # [seeds, 2, sentences, 10]
    seeds, _, count, _ = sides.shape
    draw = np.random.default_rng(0)
    of_seeds, of_sentences = (draw.multinomial(n, np.full(n, 1 / n), DRAWS) for n in (seeds, count))
    drawn = np.stack([[bleu_of(of_sentences @ side) for side in pair] for pair in sides])  # [seeds, 2, draws]
    apart = ((drawn[:, 0] - drawn[:, 1]).T * of_seeds).sum(1) / seeds
    whole = bleu_of(sides.sum(2))
    low, high = np.percentile(apart, [2.5, 97.5])
    return Difference(float((whole[:, 0] - whole[:, 1]).mean()), float(low), float(high))


def documents(run: Run) -> list[list[float]]:
    """Summed loss and number of tokens of each document, in the own row on test."""
    return run["metrics"]["test"][-1]["documents"]


Published = dict[str, dict[str, list[float]]]  # dev and test of a paper's rows, by the experiment's name, set by set


def compare_table(groups: list[Group], against: str, published: Published) -> tuple[list[str], Lines]:
    """The own row of each group, its mean over seeds, the difference to its opponent, the papers' figures."""
    groups = sorted(groups, key=lambda group: (group.first["dataset"]["name"], -group.mean("test")))
    kind = units([group.first for group in groups])
    header = [
        "run",
        "seeds",
        "data",
        "memories",
        "M",
        "eviction",
        "params",
        f"dev {kind}",
        f"test {kind}",
        *(["dev BLEU", "test BLEU", f"BLEU vs {against}"] if any("bleu" in group.row for group in groups) else []),
        f"vs {against}, 95 % interval",
        "search",
        "recall",
        "train tok/s",
        "eval tok/s",
        "memory MB",
    ]
    lines = [compared(group, opponent(group, groups, against), "test BLEU" in header) for group in groups]
    for title, rows in published.items():
        found = [rows.get(group.first["name"], []) for group in groups]
        if any(found):
            header.append(f"{title}*")
            lines = [[*line, " / ".join(f"{x:.2f}" for x in own)] for line, own in zip(lines, found, strict=True)]
    return header, lines


def ordering(groups: list[Group], published: Published) -> tuple[list[str], Lines]:
    """Every two rows that a set of published figures has: do they stand in the same order on test?

    *agrees* and *disagrees* where a difference is shown at 95 %, else *no difference shown*, or *no interval* where there is
    but one part and seed. Rows of which there are several settings here are left out.
    """
    names = Counter(group.first["name"] for group in groups)
    lines = []
    for title, rows in published.items():
        known = [group for group in groups if group.first["name"] in rows and names[group.first["name"]] == 1]
        for one, other in combinations(sorted(known, key=lambda group: -rows[group.first["name"]][-1]), 2):
            theirs = rows[one.first["name"]][-1] - rows[other.first["name"]][-1]
            if comparable(one, other):
                lines.append([title, one.first["name"], other.first["name"], f"{theirs:+.2f}", *judged(one, other, theirs)])
    return ["published in", "row", "less row", "paper", "here, 95 % interval", "order"], lines


def judged(one: Group, other: Group, theirs: float) -> tuple[str, str]:
    """The difference here, and whether its sign is the published one's."""
    own = difference(one, other)
    told = f"{own.value:+.2f} {own.interval}"
    if not own.shown:
        return told, "no interval" if math.isnan(own.low) else "no difference shown"
    return told, "agrees" if own.value * theirs > 0 else "disagrees"


def compared(group: Group, other: Group | None, translates: bool) -> list[str]:
    """A line."""
    run, row = group.first, group.row
    parameters, speed = run["parameters"], group.average(lambda run: run["train"].get("tokens_per_second"))
    sizes = sorted({size for run in group.runs if (size := memory_size(run)) is not None})
    recall = group.average(lambda run: run["datastore"]["recall"]) if row["search"] else None
    reading = group.average(lambda run: run["metrics"]["test"][-1]["tokens_per_second"])
    peak = group.average(lambda run: run["metrics"]["test"][-1]["peak_memory_mb"])
    return [
        run["name"],
        group.seeds,
        evaluated(run)[0],
        row["memories"],
        " or ".join(f"{size:,}" for size in sizes),
        row.get("eviction") or "",
        f"{parameters / 1e6:.1f}M" if parameters else "",
        f"{group.mean('valid'):.2f}",
        f"{group.mean('test'):.2f}",
        *([group.bleu("valid"), group.bleu("test"), told(other and bleu_difference(group, other))] if translates else []),
        str(difference(group, other)) if other else "",
        row["search"] or "",
        figure(recall, ".2f"),
        figure(speed, ",.0f"),
        figure(reading, ",.0f"),
        figure(peak, ",.0f"),
    ]


def told(value: Any) -> str:
    """In words, or nothing."""
    return "" if value is None else str(value)


def figure(value: float | None, form: str) -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else format(value, form)
