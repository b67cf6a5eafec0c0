"""Figures of one run: its curves, and its analysis."""

from __future__ import annotations

import csv
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

from trime.metrics import MEASURES
from trime.report.figures.base import Figure
from trime.report.figures.canvas import BLUE, GREY, ORANGE, SCALES, Panel, draw_curve, draw_dots
from trime.report.tables import metric_name, metric_value

LABEL_WIDTH = 30  # characters per line of a row's name


class Curves(Figure):
    """Test results, and what was measured over the updates of training, the size of a memory or the frequency of tokens."""

    title = "Curves"

    def panels(self, results: dict[str, Any], history: Path) -> list[Panel]:
        return run_panels(results, history)

    def height(self, results: dict[str, Any]) -> float:
        return max(3.2, 1.6 + 0.6 * len(results["metrics"]["test"]))


class AnalysisFigure(Figure):
    """What ``evaluate.analysis`` measured."""

    title = "Analysis"

    def panels(self, results: dict[str, Any], history: Path) -> list[Panel]:
        return analysis_panels(results)


def run_panels(results: dict[str, Any], history: Path) -> list[Panel]:
    """Return the panel of test results, and those of training curve, gates, staleness, memory share and memory size, if any."""
    rows = results["metrics"]["test"]
    metric, names = metric_name(rows[0]), [textwrap.fill(row["memories"], LABEL_WIDTH) for row in rows]
    values = [[metric_value(row)] for row in rows]
    panels: list[Panel] = [
        lambda axis: draw_dots(axis, names, values, [None] * len(rows), metric, [GREY, *[BLUE] * (len(rows) - 1)])
    ]
    if history.exists():
        panels.append(lambda axis: training_curve(axis, history, metric))
    if gates := read_gates(history):
        panels.append(lambda axis: gate_curves(axis, gates))
    if layers := [layer for layer in results.get("staleness", []) if layer["ages"]]:
        panels.append(lambda axis: staleness_curves(axis, layers))
    if with_shares := [row for row in rows if row.get("memory_share")]:
        panels.append(lambda axis: share_curves(axis, with_shares))
    if with_sizes := [row for row in results["metrics"]["valid"] if row["by_memory_size"]]:
        panels.append(lambda axis: size_curves(axis, with_sizes, metric))
    return panels


def training_curve(axis: Any, history: Path, metric: str) -> None:
    """Draw training and validation loss over updates, as perplexity or bits per character."""
    with open(history, newline="") as file:
        rows = list(csv.DictReader(file))
    for column, label, colour in (("train/loss", "training (one batch)", GREY), ("valid/objective", "validation", ORANGE)):
        points = [(int(row["update"]), MEASURES[metric](float(row[column]))) for row in rows if row[column]]
        if points:
            axis.plot(*zip(*points, strict=True), label=label, color=colour, marker="o" if len(points) < 30 else None, ms=3)
    axis.set(yscale=SCALES[metric], xlabel="update", ylabel=f"{metric} of the training objective", title="training")
    axis.legend(frameon=False)


def read_gates(history: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the values of each gate during training, as (update, share of memory)."""
    if not history.exists():
        return {}
    with open(history, newline="") as file:
        rows = list(csv.DictReader(file))
    columns = rows[0] if rows else {}
    gates = {name: name.removeprefix("train/").replace("/gate/", ", ") for name in columns if "/gate/" in name}
    return {label: [(int(row["update"]), float(row[name])) for row in rows if row[name]] for name, label in gates.items()}


def gate_curves(axis: Any, gates: dict[str, list[tuple[int, float]]]) -> None:
    """Draw how much each head takes from memory during training (Wu et al. 2022, Eq. 1)."""
    for name, points in gates.items():
        axis.plot(*zip(*points, strict=True), label=name)
    axis.set(xlabel="update", ylabel="share of memory, σ(b)", ylim=(0, 1), title="gates")
    axis.legend(frameon=False, fontsize=7)


def staleness_curves(axis: Any, layers: list[dict[str, Any]]) -> None:
    """Draw the staleness of stored keys by age (Wu et al. 2022, section 3.2).

    That is their distance from the current key, and their share of retrieved over their share of stored entries.
    """
    for layer in layers:
        ages = [bucket["age"] for bucket in layer["ages"]]
        distances = [bucket["distance"] for bucket in layer["ages"]]
        ratios = [bucket["share_retrieved"] / bucket["share_stored"] for bucket in layer["ages"]]
        axis.plot(ages, distances, marker="o", ms=3, label=f"distance from the current key, layer {layer['layer']}")
        axis.plot(ages, ratios, marker="s", ms=3, label=f"share retrieved / share stored, layer {layer['layer']}")
    axis.set(xlabel="age in segments", ylim=(0, None), title="staleness at the end of training")
    axis.legend(frameon=False, fontsize=7)


def share_curves(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the share of the target's probability that comes from memories, by the token's frequency on dev."""
    for row in rows:
        cells = [cell for cell in row["memory_share"] if cell["mean"] is not None and cell["bucket"] != "average"]
        points = [100 * cell["mean"] for cell in cells]
        axis.plot([cell["bucket"] for cell in cells], points, marker="o", ms=4, label=row["memories"])
    axis.set(
        xlabel="frequency of the token on dev", ylabel="share of P(target), %", ylim=(0, 103), title="probability from memories"
    )
    axis.legend(frameon=False, fontsize=7)


def size_curves(axis: Any, rows: list[dict[str, Any]], metric: str) -> None:
    """Draw the best dev result of each row over the size of the long memory."""
    for row in rows:
        draw_curve(axis, row["by_memory_size"], row["memories"], metric)
    axis.set(xlabel="contexts in long memory", ylabel=f"dev {metric}", title="size of long memory")
    axis.legend(frameon=False, fontsize=7)


def analysis_panels(results: dict[str, Any]) -> list[Panel]:
    """Return the panels of loss by frequency, retrieval accuracy, and loss over the size of the long memory, if any."""
    if "analysis" not in results:
        return []
    analysis, metric = results["analysis"]["test"], metric_name(results["metrics"]["test"][-1])
    parts = [buckets_panel, *[retrieval_panel] * bool(analysis["retrieval"]), *[sizes_panel] * bool(analysis["by_memory_size"])]
    return [partial(part, analysis=analysis, metric=metric) for part in parts]


def buckets_panel(axis: Any, analysis: dict[str, Any], metric: str) -> None:
    """Draw the loss of each row by the token's frequency on dev."""
    for label, cells in analysis["buckets"].items():
        shown = [cell for cell in cells if cell["loss"] is not None]
        losses = [MEASURES[metric](cell["loss"]) for cell in shown]
        axis.plot([cell["bucket"] for cell in shown], losses, marker="o", ms=4, label=label)
    axis.set(yscale=SCALES[metric], xlabel="frequency of the token on dev", ylabel=metric, title="by frequency")
    axis.legend(frameon=False, fontsize=7)


def retrieval_panel(axis: Any, analysis: dict[str, Any], metric: str) -> None:
    """Draw how often the target is among the K nearest entries."""
    names, shares = zip(*analysis["retrieval"].items(), strict=True)
    axis.bar(names, [100 * share for share in shares], color=BLUE, width=0.6)
    for position, share in enumerate(shares):
        axis.text(position, 100 * share, f"{100 * share:.1f}", ha="center", va="bottom", fontsize=9)
    axis.set(xlabel="nearest entries K", ylabel="target among them, %", ylim=(0, 105), title="retrieval accuracy")


def sizes_panel(axis: Any, analysis: dict[str, Any], metric: str) -> None:
    """Draw the loss over the size of the long memory."""
    draw_curve(axis, analysis["by_memory_size"], "test", metric)
    axis.set(xlabel="contexts in long memory", ylabel=metric, title="size of long memory")
