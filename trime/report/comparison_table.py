"""Comparison of runs: a line for each group of seeds with its difference to a baseline, beside the papers' results."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np

from trime.report.bootstrap import bleu_difference, difference
from trime.report.groups import Group, baseline_of, comparable, group_labels, memory_size, rank_groups, size_text
from trime.report.tables import (
    EDGE,
    PROCESSOR_KEY,
    PROCESSOR_TIME,
    TableRows,
    decimals,
    edge_settings,
    mark_edge,
    metric_names,
    processor_text,
)
from trime.report.texts import is_trained

# By the title of a set of published results and the experiment's name: dev and test, or test alone.
PublishedResults = dict[str, dict[str, list[float]]]
INTERVAL = "vs {}, 95 % interval"  # the column of differences to a baseline


def compare_table(groups: list[Group], baseline: str, published: PublishedResults) -> tuple[list[str], TableRows]:
    """Return header and lines of runs on one text: each group's last row, its difference to the baseline, published results.

    Columns in which every cell is empty are left out.
    """
    groups = rank_groups(groups)[1]
    metric = metric_names([group.first for group in groups])
    cells = [
        {"run": label} | group_columns(group, baseline_of(group, groups, baseline), baseline, metric)
        for label, group in zip(group_labels(groups), groups, strict=True)
    ]
    for title, rows in published.items():
        for line, group in zip(cells, groups, strict=True):
            line[f"{title}*"] = " / ".join(f"{x:.2f}" for x in rows.get(group.first["name"], []))
    header = [title for title in cells[0] if any(line[title] for line in cells)]
    return header, [[line[title] for title in header] for line in cells]


def order_table(groups: list[Group], published: PublishedResults) -> tuple[list[str], TableRows]:
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


def group_columns(group: Group, other: Group | None, baseline: str, metric: str) -> dict[str, str]:
    """Return the cells of a group's line by title: its results, what they are over, and what they cost."""
    run, row = group.first, group.row
    sizes = sorted({size for run in group.runs if (size := memory_size(run)) is not None}, key=np.mean)
    recall = group.average(lambda run: run["datastore"]["recall"]) if row["search"] else None
    return {
        "test BLEU": format_optional(group.bleu("test"), ".2f"),
        f"BLEU vs {baseline}": str((other and "bleu" in row and bleu_difference(group, other)) or ""),
        f"test {metric}": decimals(group.mean("test")),
        INTERVAL.format(baseline): str(difference(group, other)) if other else "",
        "dev BLEU": format_optional(group.bleu("valid"), ".2f"),
        f"dev {metric}": decimals(group.mean("valid")),
        # Where tokens are bytes, this is the column of the metric.
        "test bits/byte": format_optional(group.average_cell("bits_per_byte"), ".3f"),
        "seeds": group.seeds_text,
        "trained on": run["dataset"]["name"] if is_trained(run) else "not trained",
        "memories": row["memories"],
        "M": " or ".join(map(size_text, sizes)),
        "eviction": row.get("eviction") or "",
        "params": count_text(run["parameters"]) if run["parameters"] else "",
        "search": row["search"] or "",
        "recall": format_optional(recall, ".2f"),
        f"train {PROCESSOR_TIME}": processor_text({PROCESSOR_KEY: group.average(lambda run: run["train"].get(PROCESSOR_KEY))}),
        PROCESSOR_TIME: processor_text({PROCESSOR_KEY: group.average_cell(PROCESSOR_KEY)}),
        "memory MB": format_optional(group.average_cell("peak_memory_mb"), ",.0f"),
        f"tuned to an edge {EDGE}": edge_settings(group.dev),
    }


def count_text(count: int) -> str:
    """Return a count of parameters as tables print it: ``950``, ``14.3k`` or ``247.0M``."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def format_optional(value: float | None, specification: str) -> str:
    """Return a formatted number; an empty cell for None."""
    return "" if value is None else format(value, specification)
