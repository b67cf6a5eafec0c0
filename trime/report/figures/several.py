"""Pictures of several runs, and of a replay."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trime.report.figures.canvas import BLUE, GREY, Panel, bars, canvas, curve, fill, over_sizes, saved, small_panels
from trime.report.groups import Group, labels, ranked
from trime.report.tables import evaluated, marked, replayed, unit, units


def several_panels(groups: list[Group], runs: list[dict[str, Any]]) -> list[Panel]:
    """The own row of each group; where there are: policies over sizes, curves over the size of the long memory."""
    panels: list[Panel] = [partial(compare_panel, groups=groups)]
    if len({group.row.get("eviction") for group in groups} - {None}) > 1:
        panels.append(partial(policies_panel, groups=groups))
    return panels + curves_panels(runs)


def compare_picture(groups: list[Group], path: Path) -> Path:
    """The own row of each group."""
    figure, (axis,) = canvas(8, max(2.6, 1.2 + 0.42 * len(groups)), 1)
    compare_panel(axis, groups)
    return saved(figure, path)


def compare_panel(axis: Any, groups: list[Group]) -> None:
    """The worst first; a dot is a seed, where there are several."""
    kind, groups = ranked(groups)
    colours = [BLUE if group.first["name"].startswith("trime") else GREY for group in groups]
    names = [marked(label, group.dev) for label, group in zip(labels(groups), groups, strict=True)]
    bars(axis, names, [group.figures("test", kind) for group in groups], kind, colours)
    axis.set_title(", ".join(sorted({evaluated(group.first)[0] for group in groups})))
    if {BLUE, GREY} <= {*colours}:
        for colour, label in ((BLUE, "trained by TRIME"), (GREY, "others")):
            axis.plot([], [], "s", ms=8, color=colour, label=label)
        axis.legend(frameon=False, fontsize=9, loc="lower right")


def policies_picture(groups: list[Group], path: Path) -> Path:
    """Test measure over the size of the memory."""
    figure, (axis,) = canvas(7.5, 4.8, 1)
    policies_panel(axis, groups)
    return saved(figure, path)


def policies_panel(axis: Any, groups: list[Group]) -> None:
    """Draw a line for each experiment and policy, its mean over seeds (Attendre section 3.1).

    Where layers have memories of different sizes, their mean is the place on the axis.
    """
    lines: dict[str, dict[float, float]] = {}
    for group in groups:
        name, row, value = group.first["name"], group.row, group.mean("test")
        if row.get("eviction"):
            lines.setdefault(f"{name}, {row['eviction']}", {})[float(np.mean(row["memory_size"]))] = value
        elif row["memory_size"] == 0:
            axis.axhline(value, color="black", lw=1, ls=":", label=f"{name}, no memory")
    for label, points in sorted(lines.items()):
        axis.plot(*zip(*sorted(points.items()), strict=True), marker="o", ms=4, label=label)
    every, kind = sorted({size for points in lines.values() for size in points}), units([group.first for group in groups])
    axis.set(xlabel="entries of the memory", ylabel=f"test {kind}", title="eviction policies")
    over_sizes(axis, every)


def curves_picture(runs: list[dict[str, Any]], path: Path) -> Path:
    """Every analysed run's curve over the size of the long memory (TRIME Figure 3)."""
    panels = curves_panels(runs)
    figure, axes = canvas(1 + 6 * len(panels), 4.2, len(panels))
    fill(axes, panels)
    return saved(figure, path)


def curves_panels(runs: list[dict[str, Any]]) -> list[Panel]:
    """Words and bytes apart; none where no run was analysed."""
    shown = [run for run in runs if run.get("analysis", {}).get("dev", {}).get("by_memory_size")]
    kinds = sorted({unit(run["metrics"]["test"][-1]) for run in shown}, reverse=True)
    return [partial(curves_panel, runs=shown, kind=kind) for kind in kinds]


def curves_panel(axis: Any, runs: list[dict[str, Any]], kind: str) -> None:
    for run in (run for run in runs if unit(run["metrics"]["test"][-1]) == kind):
        label = f"{run['name']} on {evaluated(run)[0]}, seed {run['seed']}"
        curve(axis, run["analysis"]["dev"]["by_memory_size"], label, kind)
    axis.set(xlabel="contexts in long memory", ylabel=f"dev {kind}", title="size of long memory")
    axis.legend(frameon=False, fontsize=8)


def replay_picture(found: dict[str, Any], path: Path) -> Path:
    """What each policy retains, and its perplexity, over the size of the memory; the oracle is black.

    A panel for each memory and measure, and, where several c were asked for, for each policy.
    """
    panels = [
        (memory["memory"], title, value, rows)
        for memory in found["memories"]
        for rows in by_policy(memory["rows"])
        for title, value in replayed(found["unit"]).items()
    ]
    figure, axes = small_panels(len(panels), 4)
    kind = "exact" if found["exact"] else "approximate"
    for axis, (memory, title, value, rows) in zip(axes, panels, strict=False):
        for name in dict.fromkeys(row["policy"] for row in rows):
            points = sorted((row["size"], value(row)) for row in rows if row["policy"] == name)
            style = {"oracle": {"color": "black", "ls": "--"}, "fifo": {"color": GREY}}.get(name, {})
            axis.plot(*zip(*points, strict=True), marker="o", ms=4, label=name, **style)
        sizes = sorted({row["size"] for row in rows})
        axis.set(xlabel="entries", ylabel=title, title=f"{memory}, {kind}")
        over_sizes(axis, sizes)
    return saved(figure, path)


def by_policy(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """All rows; where policies come at several c, each policy's own, beside those that have none."""
    swept = list(dict.fromkeys(row["policy"].split(" ")[0] for row in rows if " c=" in row["policy"]))
    return [[row for row in rows if row["policy"].split(" ")[0] in (name, "fifo", "oracle")] for name in swept] or [rows]
