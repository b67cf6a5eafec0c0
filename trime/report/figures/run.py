"""Pictures of one run, panel by panel."""

from __future__ import annotations

import csv
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

from trime.metrics import MEASURES
from trime.report.figures.canvas import BLUE, GREY, ORANGE, SCALES, Panel, bars, canvas, curve, fill, saved
from trime.report.tables import evaluated, measure, unit

WIDE = 30  # characters of a row's name on a line


def run_picture(results: dict[str, Any], history: Path, path: Path) -> Path:
    """All panels of a run, side by side."""
    panels, rows = run_panels(results, history), len(results["metrics"]["test"])
    figure, axes = canvas(1.5 + 5.2 * len(panels), max(3.2, 1.6 + 0.6 * rows), len(panels))
    fill(axes, panels)
    axes[0].set_title(f"{results['name']} on {evaluated(results)[0]}, seed {results['seed']}")
    return saved(figure, path)


def run_panels(results: dict[str, Any], history: Path) -> list[Panel]:
    """Test figures of every row; where there are: training curve, gates, staleness, memory's share, loss over memory size."""
    rows = results["metrics"]["test"]
    kind, names = unit(rows[0]), [textwrap.fill(row["memories"], WIDE) for row in rows]
    panels: list[Panel] = [
        lambda axis: bars(axis, names, [[measure(row)] for row in rows], kind, [GREY, *[BLUE] * (len(rows) - 1)])
    ]
    if history.exists():
        panels.append(lambda axis: training_curve(axis, history, kind))
    if gates := gates_in(history):
        panels.append(lambda axis: gate_curves(axis, gates))
    if stale := [layer for layer in results.get("staleness", []) if layer["ages"]]:
        panels.append(lambda axis: staleness_curves(axis, stale))
    if shared := [row for row in rows if row.get("memory_share")]:
        panels.append(lambda axis: share_curves(axis, shared))
    if curves := [row for row in results["metrics"]["valid"] if row["by_memory_size"]]:
        panels.append(lambda axis: size_curve(axis, curves, kind))
    return panels


def training_curve(axis: Any, history: Path, kind: str) -> None:
    """Training and validation loss over updates, as perplexity or bits."""
    with open(history, newline="") as file:
        rows = list(csv.DictReader(file))
    for column, label, colour in (("train/loss", "training (one batch)", GREY), ("valid/objective", "validation", ORANGE)):
        points = [(int(row["update"]), MEASURES[kind](float(row[column]))) for row in rows if row[column]]
        if points:
            axis.plot(*zip(*points, strict=True), label=label, color=colour, marker="o" if len(points) < 30 else None, ms=3)
    axis.set(yscale=SCALES[kind], xlabel="update", ylabel=f"{kind} of the training objective", title="training")
    axis.legend(frameon=False)


def gates_in(history: Path) -> dict[str, list[tuple[int, float]]]:
    """Each gate over training: (update, share of memory)."""
    if not history.exists():
        return {}
    with open(history, newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in (rows[0] if rows else {}) if name.startswith("train/gate/")]
    return {
        name.removeprefix("train/gate/"): [(int(row["update"]), float(row[name])) for row in rows if row[name]]
        for name in names
    }


def gate_curves(axis: Any, gates: dict[str, list[tuple[int, float]]]) -> None:
    """How much each head takes from memory, over training (Wu et al. 2022, Eq. 1)."""
    for name, points in gates.items():
        axis.plot(*zip(*points, strict=True), label=name)
    axis.set(xlabel="update", ylabel="share of memory, σ(b)", ylim=(0, 1), title="gates")
    axis.legend(frameon=False, fontsize=7)


def staleness_curves(axis: Any, layers: list[dict[str, Any]]) -> None:
    """Stored keys by age: how far from today's, and how much oftener retrieved than stored (Wu et al. 2022, 3.2)."""
    for layer in layers:
        ages = [one["age"] for one in layer["ages"]]
        far = [one["distance"] for one in layer["ages"]]
        oftener = [one["share_retrieved"] / one["share_stored"] for one in layer["ages"]]
        axis.plot(ages, far, marker="o", ms=3, label=f"distance from today's key, layer {layer['layer']}")
        axis.plot(ages, oftener, marker="s", ms=3, label=f"retrieved over stored share, layer {layer['layer']}")
    axis.set(xlabel="age in segments", ylim=(0, None), title="staleness at the end of training")
    axis.legend(frameon=False, fontsize=7)


def share_curves(axis: Any, rows: list[dict[str, Any]]) -> None:
    """How much of the target's probability memories give, by how often the word occurs on dev."""
    for row in rows:
        cells = [cell for cell in row["memory_share"] if cell["mean"] is not None and cell["bucket"] != "average"]
        points = [100 * cell["mean"] for cell in cells]
        axis.plot([cell["bucket"] for cell in cells], points, marker="o", ms=4, label=row["memories"])
    axis.set(xlabel="frequency of the token on dev", ylabel="share of P(target), %", ylim=(0, 103), title="what memories give")
    axis.legend(frameon=False, fontsize=7)


def size_curve(axis: Any, rows: list[dict[str, Any]], kind: str) -> None:
    """Best validation loss at each size of the long memory."""
    for row in rows:
        sizes, losses = zip(*row["by_memory_size"].items(), strict=True)
        axis.plot([int(size) for size in sizes], [MEASURES[kind](loss) for loss in losses], marker="o", label=row["memories"])
    axis.set(xscale="log", xlabel="contexts in long memory", ylabel=f"dev {kind}", title="size of long memory")
    axis.set_xticks([int(size) for size in sizes], sizes)
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=7)


def analysis_picture(results: dict[str, Any], path: Path) -> Path:
    """All panels of an analysis, side by side."""
    panels = analysis_panels(results)
    figure, axes = canvas(1 + 5.4 * len(panels), 4, len(panels))
    fill(axes, panels)
    figure.suptitle(f"{results['name']} on {evaluated(results)[0]}, test")
    return saved(figure, path)


def analysis_panels(results: dict[str, Any]) -> list[Panel]:
    """Loss by frequency, retrieval accuracy, and loss over the size of the long memory, as far as there are."""
    if "analysis" not in results:
        return []
    analysis, kind = results["analysis"]["test"], unit(results["metrics"]["test"][-1])
    parts = [buckets_panel, *[retrieval_panel] * bool(analysis["retrieval"]), *[sizes_panel] * bool(analysis["by_memory_size"])]
    return [partial(part, analysis=analysis, kind=kind) for part in parts]


def buckets_panel(axis: Any, analysis: dict[str, Any], kind: str) -> None:
    for label, cells in analysis["buckets"].items():
        shown = [cell for cell in cells if cell["loss"] is not None]
        losses = [MEASURES[kind](cell["loss"]) for cell in shown]
        axis.plot([cell["bucket"] for cell in shown], losses, marker="o", ms=4, label=label)
    axis.set(yscale=SCALES[kind], xlabel="frequency of the token on dev", ylabel=kind, title="by frequency")
    axis.legend(frameon=False, fontsize=7)


def retrieval_panel(axis: Any, analysis: dict[str, Any], kind: str) -> None:
    names, shares = zip(*analysis["retrieval"].items(), strict=True)
    axis.bar(names, [100 * share for share in shares], color=BLUE, width=0.6)
    for place, share in enumerate(shares):
        axis.text(place, 100 * share, f"{100 * share:.1f}", ha="center", va="bottom", fontsize=9)
    axis.set(xlabel="nearest entries K", ylabel="target among theirs, %", ylim=(0, 105), title="retrieval accuracy")


def sizes_panel(axis: Any, analysis: dict[str, Any], kind: str) -> None:
    curve(axis, analysis["by_memory_size"], "test", kind)
    axis.set(xlabel="contexts in long memory", ylabel=kind, title="size of long memory")
