"""Pictures that compare several runs, or the policies of a replay."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trime.report.bootstrap import interval_of
from trime.report.figures.canvas import (
    BLUE,
    GREY,
    Panel,
    canvas,
    draw_curve,
    draw_dots,
    fill_axes,
    finish_size_axis,
    line_style,
    panel_grid,
    save_picture,
)
from trime.report.groups import Group, group_labels, rank_groups
from trime.report.tables import mark_edge, metric_name, metric_names, replay_metrics
from trime.report.texts import evaluated_text


def several_panels(groups: list[Group], runs: list[dict[str, Any]]) -> list[Panel]:
    """Return the panel of each group's last row, and those of eviction policies and sizes of the long memory, if any."""
    return [partial(compare_panel, groups=groups), *policies_panels(groups), *curves_panels(runs)]


def compare_picture(texts: list[list[Group]], path: Path) -> Path:
    """Draw the last row of each group, one axis below the other for each text."""
    heights = [max(2.6, 1.2 + 0.42 * len(groups)) for groups in texts]
    figure, axes = canvas(8, sum(heights), 1, len(texts), heights)
    fill_axes(axes, [partial(compare_panel, groups=groups) for groups in texts])
    return save_picture(figure, path)


def compare_panel(axis: Any, groups: list[Group]) -> None:
    """Draw the last row of each group, the worst first, with its 95 % interval and a dot for each seed."""
    metric, groups = rank_groups(groups)
    groups = [group for group in groups if np.isfinite(group.mean("test", metric))] or groups
    colours = [BLUE if is_trained_by_trime(group) else GREY for group in groups]
    names = [mark_edge(label, group.dev) for label, group in zip(group_labels(groups), groups, strict=True)]
    intervals = [interval_of(group) for group in groups]
    draw_dots(axis, names, [group.values("test", metric) for group in groups], intervals, metric, colours)
    axis.set_title(evaluated_text(groups[0].first).title)
    if {BLUE, GREY} <= {*colours}:
        for colour, label in ((BLUE, "trained by TRIME"), (GREY, "others")):
            axis.plot([], [], "o", ms=7, color=colour, label=label)
        axis.set_ylim(len(groups) + 1.2, -0.7)  # room for the legend below the last row
        axis.legend(frameon=False, fontsize=9, loc="lower left" if metric == "BLEU" else "lower right")


def is_trained_by_trime(group: Group) -> bool:
    """Return True if a group's models were trained with a memory; runs of earlier versions tell by their name alone."""
    return bool(group.first.get("trained_with_memory", group.first["name"].startswith("trime")))


def policies_panels(groups: list[Group]) -> list[Panel]:
    """Return a panel of test results over the size of the memory, if there are several eviction policies."""
    policies = {group.row.get("eviction") for group in groups} - {None}
    return [partial(policies_panel, groups=groups)] if len(policies) > 1 else []


def policies_panel(axis: Any, groups: list[Group]) -> None:
    """Draw a line for each experiment and policy, averaged over seeds (Attendre section 3.1).

    Layers with memories of different sizes are placed at the mean size.
    """
    lines: dict[str, dict[float, float]] = {}
    for group in groups:
        name, row, value = group.first["name"], group.row, group.mean("test")
        if row.get("eviction"):
            lines.setdefault(f"{name}, {row['eviction']}", {})[float(np.mean(row["memory_size"]))] = value
        elif row["memory_size"] == 0:
            axis.axhline(value, color="black", lw=1, ls=":", label=f"{name}, no memory")
    for number, (label, points) in enumerate(sorted(lines.items())):
        axis.plot(*zip(*sorted(points.items()), strict=True), label=label, **line_style(number))
    sizes = sorted({size for points in lines.values() for size in points})
    metric = metric_names([group.first for group in groups])
    title = f"eviction policies on {evaluated_text(groups[0].first).title}"
    axis.set(xlabel="entries in memory", ylabel=f"test {metric}", title=title)
    finish_size_axis(axis, sizes)


def curves_panels(runs: list[dict[str, Any]]) -> list[Panel]:
    """Return a panel for each metric, for the runs that were analysed over the size of the long memory (TRIME Figure 3)."""
    analysed = [run for run in runs if run.get("analysis", {}).get("valid", {}).get("by_memory_size")]
    metrics = sorted({metric_name(run["metrics"]["test"][-1]) for run in analysed}, reverse=True)
    return [partial(curves_panel, runs=analysed, metric=metric) for metric in metrics]


def curves_panel(axis: Any, runs: list[dict[str, Any]], metric: str) -> None:
    """Draw the dev results of all runs with this metric over the size of the long memory."""
    for run in (run for run in runs if metric_name(run["metrics"]["test"][-1]) == metric):
        label = f"{run['name']}, seed {run['seed']}"
        draw_curve(axis, run["analysis"]["valid"]["by_memory_size"], label, metric)
    title = f"size of long memory on {evaluated_text(runs[0]).title}"
    axis.set(xlabel="contexts in long memory", ylabel=f"dev {metric}", title=title)
    axis.legend(frameon=False, fontsize=8)


def replay_picture(results: dict[str, Any], path: Path) -> Path:
    """Draw what each policy retains, and its perplexity, over the size of the memory; the oracle is black.

    There is a panel for each memory and metric, and for each policy that was replayed with several c.
    """
    panels = [
        (memory["memory"], title, value, rows)
        for memory in results["memories"]
        for rows in split_by_policy(memory["rows"])
        for title, value in replay_metrics(results["unit"]).items()
    ]
    figure, axes = panel_grid(len(panels))
    accuracy = "exact" if results["exact"] else "approximate"
    for axis, (memory, title, value, rows) in zip(axes, panels, strict=False):
        for number, name in enumerate(dict.fromkeys(row["policy"] for row in rows)):
            points = sorted((row["size"], value(row)) for row in rows if row["policy"] == name)
            style = {"oracle": {"color": "black", "ls": "--"}, "fifo": {"color": GREY}}.get(name, {})
            axis.plot(*zip(*points, strict=True), label=name, **line_style(number) | style)
        sizes = sorted({row["size"] for row in rows})
        axis.set(xlabel="entries", ylabel=title, title=f"{memory}, {accuracy}")
        finish_size_axis(axis, sizes)
    return save_picture(figure, path)


def split_by_policy(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the rows of each policy that has several c, with those of fifo and oracle; all rows together if none has."""
    swept = list(dict.fromkeys(row["policy"].split(" ")[0] for row in rows if " c=" in row["policy"]))
    return [[row for row in rows if row["policy"].split(" ")[0] in (name, "fifo", "oracle")] for name in swept] or [rows]
