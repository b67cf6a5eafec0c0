"""Comparison of runs: a line for each group of seeds with its difference to a baseline, beside the papers' results."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np

from trime.report.differences import bleu_difference, difference
from trime.report.groups import Group, baseline_of, comparable, group_labels, memory_size, rank_groups, size_text
from trime.report.tables import EDGE, Lines, edge_settings, mark_edge, metric_names

# By the title of a set of published results and the experiment's name: dev and test, or test alone.
PublishedResults = dict[str, dict[str, list[float]]]
INTERVAL = "vs {}, 95 % interval"  # the column of differences to a baseline


def compare_table(groups: list[Group], baseline: str, published: PublishedResults) -> tuple[list[str], Lines]:
    """Return header and lines of runs on one text: each group's last row, its difference to the baseline, published results."""
    groups = rank_groups(groups)[1]
    metric = metric_names([group.first for group in groups])
    header = [
        "run",
        "seeds",
        "trained on",
        "memories",
        "M",
        "eviction",
        "params",
        f"dev {metric}",
        f"test {metric}",
        *(["dev BLEU", "test BLEU", f"BLEU vs {baseline}"] if any("bleu" in group.row for group in groups) else []),
        INTERVAL.format(baseline),
        "search",
        "recall",
        "train tok/s",
        "eval tok/s",
        "memory MB",
    ]
    lines = [
        [label, *comparison_cells(group, baseline_of(group, groups, baseline), "test BLEU" in header)]
        for label, group in zip(group_labels(groups), groups, strict=True)
    ]
    if any(edges := [edge_settings(group.dev) for group in groups]):
        header.append(f"tuned to an edge {EDGE}")
        lines = [[*line, edge] for line, edge in zip(lines, edges, strict=True)]
    for title, rows in published.items():
        results = [rows.get(group.first["name"], []) for group in groups]
        if any(results):
            header.append(f"{title}*")
            lines = [[*line, " / ".join(f"{x:.2f}" for x in values)] for line, values in zip(lines, results, strict=True)]
    return header, lines


def order_table(groups: list[Group], published: PublishedResults) -> tuple[list[str], Lines]:
    """Return header and lines that compare the order of every two published rows on test with the order here.

    Translations are compared by BLEU. The verdict is *agrees* or *disagrees* where the difference is significant at 95 %,
    otherwise *no difference shown*, *no interval* for a single part and seed, or *too few units*. Experiments that were run
    here with several settings are left out.
    """
    names = Counter(group.first["name"] for group in groups)
    lines = []
    for title, rows in published.items():
        published_groups = [group for group in groups if group.first["name"] in rows and names[group.first["name"]] == 1]
        for one, other in combinations(sorted(published_groups, key=lambda group: -rows[group.first["name"]][-1]), 2):
            paper = rows[one.first["name"]][-1] - rows[other.first["name"]][-1]
            if comparable(one, other):
                both = [mark_edge(group.first["name"], group.dev) for group in (one, other)]
                lines.append([title, *both, f"{paper:+.2f}", *judge_difference(one, other, paper)])
    return ["published in", "row", "minus row", "paper", "here, 95 % interval", "order"], lines


def judge_difference(one: Group, other: Group, paper: float) -> tuple[str, str]:
    """Return the measured difference as text, and the verdict whether its sign is that of the paper's difference."""
    measured = bleu_difference(one, other) if "bleu" in one.row else difference(one, other)
    if measured is None:
        return "", "no interval"
    text = f"{measured.value:+.2f} {measured.interval}"
    if not measured.has_verdict:
        return text, "no interval" if math.isnan(measured.low) else "too few units"
    if not measured.significant:
        return text, "no difference shown"
    return text, "agrees" if measured.value * paper > 0 else "disagrees"


def comparison_cells(group: Group, other: Group | None, translates: bool) -> list[str]:
    """Return the cells of a group's line, without its label."""
    run, row = group.first, group.row
    parameters, speed = run["parameters"], group.average(lambda run: run["train"].get("tokens_per_second"))
    sizes = sorted({size for run in group.runs if (size := memory_size(run)) is not None}, key=np.mean)
    recall = group.average(lambda run: run["datastore"]["recall"]) if row["search"] else None
    throughput = group.average(lambda run: run["metrics"]["test"][-1]["tokens_per_second"])
    peak = group.average(lambda run: run["metrics"]["test"][-1]["peak_memory_mb"])
    return [
        group.seeds,
        run["dataset"]["name"],
        row["memories"],
        " or ".join(map(size_text, sizes)),
        row.get("eviction") or "",
        f"{parameters / 1e6:.1f}M" if parameters else "",
        f"{group.mean('valid'):.2f}",
        f"{group.mean('test'):.2f}",
        *([format_optional(group.bleu(s), ".2f") for s in ("valid", "test")] if translates else []),
        *([str((other and bleu_difference(group, other)) or "")] if translates else []),
        str(difference(group, other)) if other else "",
        row["search"] or "",
        format_optional(recall, ".2f"),
        format_optional(speed, ",.0f"),
        format_optional(throughput, ",.0f"),
        format_optional(peak, ",.0f"),
    ]


def format_optional(value: float | None, specification: str) -> str:
    """Return a formatted number; an empty cell for None."""
    return "" if value is None else format(value, specification)
