"""Pictures of one run and of several."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trime.metrics import MEASURES
from trime.stages.compare import Group
from trime.stages.tables import evaluated, measure, replayed, unit, units

BLUE, GREY, ORANGE = "#2a6f97", "#9aa5b1", "#d9772b"
SCALES = {"perplexity": "log", "bits/char": "linear"}


def canvas(width: float, height: float, columns: int, lines: int = 1) -> Any:
    """A figure without a display, and its panels, line by line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(lines, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def saved(figure: Any, path: Path) -> Path:
    """Writes the picture whole and closes it."""
    from matplotlib import pyplot

    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=140)
    pyplot.close(figure)
    partial.replace(path)
    return path


def bars(axis: Any, names: list[str], values: list[float], kind: str, colours: list[str]) -> None:
    """Horizontal bars from the top, each with its figure."""
    places = range(len(names))
    axis.barh(places, values, color=colours, height=0.66)
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set_xlabel(f"test {kind} (lower is better)")
    axis.set_xlim(0, max(values) * 1.14)
    for place, value in zip(places, values, strict=True):
        axis.text(value, place, f" {value:.2f}", va="center", fontsize=9)


def run_picture(results: dict[str, Any], history: Path, path: Path) -> Path:
    """Test figures of every row; where there are: the training curve, gates, staleness, loss over memory size."""
    rows = results["metrics"]["test"]
    kind, names = unit(rows[0]), [row["memories"].replace(" ⊕ ", "\n⊕ ") for row in rows]
    panels: list[Callable[[Any], None]] = [
        lambda axis: bars(axis, names, [measure(row) for row in rows], kind, [GREY, *[BLUE] * (len(rows) - 1)])
    ]
    if history.exists():
        panels.append(lambda axis: training_curve(axis, history, kind))
    if gates := gates_in(history):
        panels.append(lambda axis: gate_curves(axis, gates))
    if stale := [layer for layer in results.get("staleness", []) if layer["ages"]]:
        panels.append(lambda axis: staleness_curves(axis, stale))
    if curves := [row for row in results["metrics"]["valid"] if row["by_memory_size"]]:
        panels.append(lambda axis: size_curve(axis, curves, kind))
    figure, axes = canvas(1.5 + 5.2 * len(panels), max(3.2, 1.6 + 0.55 * len(rows)), len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        panel(axis)
    axes[0].set_title(f"{results['name']} on {evaluated(results)[0]}, seed {results['seed']}")
    return saved(figure, path)


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


def size_curve(axis: Any, rows: list[dict[str, Any]], kind: str) -> None:
    """Best validation loss at each size of the long memory."""
    for row in rows:
        sizes, losses = zip(*row["by_memory_size"].items(), strict=True)
        axis.plot([int(size) for size in sizes], [MEASURES[kind](loss) for loss in losses], marker="o", label=row["memories"])
    axis.set(xscale="log", xlabel="contexts in long memory", ylabel=f"dev {kind}", title="size of long memory")
    axis.set_xticks([int(size) for size in sizes], sizes)
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=7)


def compare_picture(groups: list[Group], path: Path) -> Path:
    """The own row of each group, the worst first."""
    groups = sorted(groups, key=lambda group: -group.mean("test"))
    figure, (axis,) = canvas(8, max(2.6, 1.2 + 0.42 * len(groups)), 1)
    colours = [BLUE if group.first["name"].startswith("trime") else GREY for group in groups]
    bars(axis, labels(groups), [group.mean("test") for group in groups], units([group.first for group in groups]), colours)
    axis.set_title(", ".join(sorted({evaluated(group.first)[0] for group in groups})))
    return saved(figure, path)


def labels(groups: list[Group]) -> list[str]:
    """Each group's name, and what tells it from others of that name: memory, policy, seeds."""
    found = []
    for group in groups:
        name, same = group.first["name"], [other for other in groups if other.first["name"] == group.first["name"]]
        parts = {
            "M": (group.row["memory_size"], [other.row["memory_size"] for other in same]),
            "": (group.row.get("eviction"), [other.row.get("eviction") for other in same]),
            "seed": (group.seeds, [other.seeds for other in groups]),
        }
        apart = [f"{title} {own}".strip() for title, (own, others) in parts.items() if len(set(others)) > 1]
        found.append(f"{name} ({', '.join(apart)})" if apart else name)
    return found


def policies_picture(groups: list[Group], path: Path) -> Path:
    """Test measure over the size of the memory, a line for each experiment and policy, its mean over seeds (Attendre 3.1)."""
    lines: dict[str, dict[int, float]] = {}
    figure, (axis,) = canvas(7.5, 4.8, 1)
    for group in groups:
        name, row, value = group.first["name"], group.row, group.mean("test")
        if row.get("eviction"):
            lines.setdefault(f"{name}, {row['eviction']}", {})[row["memory_size"]] = value
        elif row["memory_size"] == 0:
            axis.axhline(value, color="black", lw=1, ls=":", label=f"{name}, no memory")
    for label, points in sorted(lines.items()):
        axis.plot(*zip(*sorted(points.items()), strict=True), marker="o", ms=4, label=label)
    every, kind = sorted({size for points in lines.values() for size in points}), units([group.first for group in groups])
    axis.set(xlabel="entries of the memory", ylabel=f"test {kind}", title="eviction policies")
    over_sizes(axis, every)
    return saved(figure, path)


def analysis_picture(results: dict[str, Any], path: Path) -> Path:
    """Loss by frequency, retrieval accuracy, and loss over the size of the long memory, as far as there are."""
    analysis, kind = results["analysis"]["test"], unit(results["metrics"]["test"][-1])
    parts = [buckets_panel, *[retrieval_panel] * bool(analysis["retrieval"]), *[sizes_panel] * bool(analysis["by_memory_size"])]
    figure, axes = canvas(1 + 5.4 * len(parts), 4, len(parts))
    for axis, part in zip(axes, parts, strict=True):
        part(axis, analysis, kind)
    figure.suptitle(f"{results['name']} on {evaluated(results)[0]}, test")
    return saved(figure, path)


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


def curve(axis: Any, losses: dict[str, float], label: str, kind: str) -> None:
    """One line over the sizes of the long memory."""
    sizes = [int(size) for size in losses]
    axis.plot(sizes, [MEASURES[kind](loss) for loss in losses.values()], marker="o", ms=4, label=label)
    axis.set_xscale("log")
    axis.set_xticks(sizes, list(map(str, sizes)))
    axis.minorticks_off()


def curves_picture(runs: list[dict[str, Any]], path: Path) -> Path:
    """Every analysed run's curve over the size of the long memory (TRIME Figure 3), words and bytes apart."""
    shown = [run for run in runs if run.get("analysis", {}).get("dev", {}).get("by_memory_size")]
    kinds = sorted({unit(run["metrics"]["test"][-1]) for run in shown}, reverse=True)
    figure, axes = canvas(1 + 6 * len(kinds), 4.2, len(kinds))
    for axis, kind in zip(axes, kinds, strict=True):
        for run in (run for run in shown if unit(run["metrics"]["test"][-1]) == kind):
            label = f"{run['name']} on {evaluated(run)[0]}, seed {run['seed']}"
            curve(axis, run["analysis"]["dev"]["by_memory_size"], label, kind)
        axis.set(xlabel="contexts in long memory", ylabel=f"dev {kind}", title="size of long memory")
        axis.legend(frameon=False, fontsize=8)
    return saved(figure, path)


def small_panels(count: int, most: int) -> tuple[Any, Any]:
    """A figure of so many panels, at most so many in a row."""
    columns = min(count, most)
    rows = -(-count // columns)
    figure, axes = canvas(1 + 5.2 * columns, 4.4 * rows, columns, rows)
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes


def over_sizes(axis: Any, sizes: list[int]) -> None:
    """Ticks at sizes of a memory, and the lines' names."""
    axis.set_xscale("log")
    axis.set_xticks(sizes, list(map(str, sizes)))
    axis.minorticks_off()
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
