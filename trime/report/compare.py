"""Runs side by side: a line for each group of them, what it is compared with, and the papers' figures and order."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np

from trime.report.differences import bleu_difference, difference
from trime.report.groups import Group, comparable, labels, memory_size, opponent, ranked, size_text
from trime.report.tables import EDGE, Lines, edges_text, evaluated, marked, units

# Dev and test, or test alone, of a paper's rows, by the experiment's name, set by set.
Published = dict[str, dict[str, list[float]]]


def compare_table(groups: list[Group], against: str, published: Published) -> tuple[list[str], Lines]:
    """The own row of each group, its mean over seeds, the difference to its opponent, the papers' figures."""
    texts = sorted({str(group.first["dataset"]["name"]) for group in groups})
    groups = [group for text in texts for group in ranked([own for own in groups if own.first["dataset"]["name"] == text])[1]]
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
    lines = [
        [label, *compared(group, opponent(group, groups, against), "test BLEU" in header)]
        for label, group in zip(labels(groups), groups, strict=True)
    ]
    if any(edges := [edges_text(group.dev) for group in groups]):
        header.append(f"tuned to an edge {EDGE}")
        lines = [[*line, edge] for line, edge in zip(lines, edges, strict=True)]
    for title, rows in published.items():
        found = [rows.get(group.first["name"], []) for group in groups]
        if any(found):
            header.append(f"{title}*")
            lines = [[*line, " / ".join(f"{x:.2f}" for x in own)] for line, own in zip(lines, found, strict=True)]
    return header, lines


def ordering(groups: list[Group], published: Published) -> tuple[list[str], Lines]:
    """Every two rows that a set of published figures has: do they stand in the same order on test, translations by BLEU?

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
                both = [marked(group.first["name"], group.dev) for group in (one, other)]
                lines.append([title, *both, f"{theirs:+.2f}", *judged(one, other, theirs)])
    return ["published in", "row", "less row", "paper", "here, 95 % interval", "order"], lines


def judged(one: Group, other: Group, theirs: float) -> tuple[str, str]:
    """The difference here, and whether its sign is the published one's."""
    own = bleu_difference(one, other) if "bleu" in one.row else difference(one, other)
    if own is None:
        return "", "no interval"
    told = f"{own.value:+.2f} {own.interval}"
    if not own.shown:
        return told, "no interval" if math.isnan(own.low) else "no difference shown"
    return told, "agrees" if own.value * theirs > 0 else "disagrees"


def compared(group: Group, other: Group | None, translates: bool) -> list[str]:
    """A line but for its label."""
    run, row = group.first, group.row
    parameters, speed = run["parameters"], group.average(lambda run: run["train"].get("tokens_per_second"))
    sizes = sorted({size for run in group.runs if (size := memory_size(run)) is not None}, key=np.mean)
    recall = group.average(lambda run: run["datastore"]["recall"]) if row["search"] else None
    reading = group.average(lambda run: run["metrics"]["test"][-1]["tokens_per_second"])
    peak = group.average(lambda run: run["metrics"]["test"][-1]["peak_memory_mb"])
    return [
        group.seeds,
        evaluated(run)[0],
        row["memories"],
        " or ".join(map(size_text, sizes)),
        row.get("eviction") or "",
        f"{parameters / 1e6:.1f}M" if parameters else "",
        f"{group.mean('valid'):.2f}",
        f"{group.mean('test'):.2f}",
        *([figure(group.bleu(s), ".2f") for s in ("valid", "test")] if translates else []),
        *([told(other and bleu_difference(group, other))] if translates else []),
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
