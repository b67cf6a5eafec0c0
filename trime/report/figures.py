"""Figures of one run, as ``report.figures`` lists them: its curves, its analysis, the weights of its memories."""

from __future__ import annotations

import csv
import textwrap
from abc import ABC
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from hydra.utils import instantiate

from trime.common.metrics import MEASURES
from trime.report.canvas import BLUE, GREY, ORANGE, PANEL_HEIGHT, SCALES, Panel, draw_dots, finish_size_axis, memory_colours
from trime.report.run_result import Bucket, MeanWeights, ScoredRun
from trime.report.tables import row_name

LABEL_WIDTH = 30  # characters per line of a row's name
SMOOTHED = 5  # logged batches in a point of the training curve, at least
AVERAGE = "average"  # the name of the bucket of all tokens


def configured_figures(settings: Any) -> dict[str, Figure]:
    """Return the figures of ``report.figures`` by name; null removes one."""
    figures: dict[str, Figure | None] = instantiate(settings, _convert_="all")
    return {name: figure for name, figure in figures.items() if figure is not None}


class Figure(ABC):
    """Panels in a grid: NAME.png, .svg and .pdf of a run or a comparison of runs, and a section ``title`` of its page."""

    title: str
    note = ""  # below the title on a page

    def panels(self, run: ScoredRun, history: Path) -> list[Panel]:
        """Return the panels of one run, from its results and its metrics.csv, which may not exist; none: no figure."""
        return []

    def comparison_panels(self, runs: list[ScoredRun]) -> list[Panel]:
        """Return the panels that compare several runs, from the results of each; none: no figure."""
        return []

    def height(self, run: ScoredRun) -> float:  # of a run's figure, in inches
        return PANEL_HEIGHT


class Curves(Figure):
    """Test results, and measurements over the updates of training, the size of a memory or the frequency of tokens."""

    title = "Curves"

    def panels(self, run: ScoredRun, history: Path) -> list[Panel]:
        rows, metric = run.metrics["test"], run.row.metric_name

        def results(axis: Any) -> None:
            names = [textwrap.fill(row_name(row.memories), LABEL_WIDTH) for row in rows]
            colours = [GREY, *[BLUE] * (len(rows) - 1)]  # the first row has no memory
            draw_dots(axis, names, [[row.value] for row in rows], [None] * len(rows), metric, colours)

        panels: list[Panel] = [results]
        if history.exists():
            with open(history, newline="") as file:
                panels += history_panels([*csv.DictReader(file)], metric)
        if any(row.memory_share for row in rows):
            shares = {row_name(row.memories): means_of(row.memory_share) for row in rows if row.memory_share}
            labels = {"xlabel": "frequency of the token on dev", "ylabel": "share of P(target), %", "ylim": (0, 103)}
            panels.append(lines_panel(shares, "probability from memories", **labels))
        if curves := {row_name(row.memories): row.by_memory_size for row in run.metrics["valid"] if row.by_memory_size}:
            panels.append(partial(sizes_panel, curves=curves, metric=metric, label=f"dev {metric}"))
        return panels

    def height(self, run: ScoredRun) -> float:
        return max(3.2, 1.6 + 0.6 * len(run.metrics["test"]))


class AnalysisFigure(Figure):
    """Loss by frequency, retrieval accuracy, and loss by size of the memory, as ``evaluate.analysis`` measured them."""

    title = "Analysis"

    def panels(self, run: ScoredRun, history: Path) -> list[Panel]:
        if not run.analysis:
            return []
        analysis, metric = run.analysis["test"], run.row.metric_name

        def retrieval(axis: Any) -> None:
            shares = [100 * share for share in analysis.retrieval.values()]
            axis.bar([*analysis.retrieval], shares, color=BLUE, width=0.6)
            for position, share in enumerate(shares):
                axis.text(position, share, f"{share:.1f}", ha="center", va="bottom", fontsize=9)
            axis.set(xlabel="nearest entries K", ylabel="target among them, %", ylim=(0, 105), title="retrieval accuracy")

        lines = {
            label: {cell.bucket: MEASURES[metric](cell.loss) for cell in cells if cell.loss is not None}
            for label, cells in analysis.buckets.items()
        }
        labels = {"xlabel": "frequency of the token on dev", "ylabel": metric, "yscale": SCALES[metric]}
        panels: list[Panel] = [lines_panel(lines, "by frequency", **labels)]
        if analysis.retrieval:
            panels.append(retrieval)
        if analysis.by_memory_size:
            panels.append(partial(sizes_panel, curves={"test": analysis.by_memory_size}, metric=metric, label=metric))
        return panels


class Weights(Figure):
    """Mean weights of a fitted mixture for each memory, by frequency of the token, similarity of the best entry,
    and length of n-gram context.
    """

    title = "Weights"
    note = (
        "By similarity, the tokens are those whose best entry in a memory is least (0–10 %) to most similar (90–100 %). "
        "A weight may fall there: weights sum to one, and where a memory matches best, another often matches even better."
    )

    def panels(self, run: ScoredRun, history: Path) -> list[Panel]:
        weights = run.subsets.weights if run.subsets else {}
        axes = {
            "by_frequency": ("frequency of the token on dev", "by frequency"),
            "by_similarity": ("tenths of dev, the least similar best entry first", "by similarity of the best entry"),
            "by_context": ("longest matching n-gram context, tokens", "by length of the matching context"),
        }
        present = [key for key in axes if any(getattr(each, key) for each in weights.values())]
        return [partial(weights_panel, weights=weights, key=key, labels=axes[key]) for key in present]


def lines_panel(lines: Mapping[str, Mapping[Any, float | None]], title: str, **labels: Any) -> Panel:
    """Return a panel with a line for each label, given as y by x."""

    def draw(axis: Any) -> None:
        for label, points in lines.items():
            axis.plot([*points], [*points.values()], marker="o", ms=4, label=label)
        axis.set(title=title, **labels)
        axis.legend(frameon=False, fontsize=7)

    return draw


def means_of(buckets: list[Bucket]) -> dict[str, float]:
    """Return the means of buckets that have one, in per cent, but for that of all tokens."""
    return {cell.bucket: 100 * cell.mean for cell in buckets if cell.mean is not None and cell.bucket != AVERAGE}


def history_panels(lines: list[dict[str, str]], metric: str) -> list[Panel]:
    """Return the panel of losses in training, as perplexity or bits per character, and that of gates, if there are any."""

    def training(axis: Any) -> None:
        for column, label, colour in (("train/loss", "training", GREY), ("valid/objective", "validation", ORANGE)):
            updates = [int(line["update"]) for line in lines if line[column]]
            losses = [float(line[column]) for line in lines if line[column]]
            if column == "train/loss" and losses:  # a batch without local memory has a loss of its own
                span = max(SMOOTHED, len(losses) // 20)
                losses, label = moving_mean(losses, span), f"training, mean of {span} batches"
            if losses:
                marker = "o" if len(losses) < 30 else None
                axis.plot(updates, [MEASURES[metric](loss) for loss in losses], label=label, color=colour, marker=marker, ms=3)
        axis.set(yscale=SCALES[metric], xlabel="update", ylabel=f"{metric} of the training objective", title="training")
        axis.legend(frameon=False)

    gates = {  # how much each head takes from memory (Wu et al. 2022, Eq. 1)
        column.removeprefix("train/").replace("/gate/", ", "): {
            int(line["update"]): float(line[column]) for line in lines if line[column]
        }
        for column in (lines[0] if lines else {})
        if "/gate/" in column
    }
    labels = {"xlabel": "update", "ylabel": "share of memory, σ(b)", "ylim": (0, 1)}
    return [training, *([lines_panel(gates, "gates", **labels)] if gates else [])]


def moving_mean(values: list[float], span: int) -> list[float]:
    """Return for each value the mean of it and of up to ``span`` - 1 values before it."""
    sums = [0.0, *accumulate(values)]
    return [(sums[end] - sums[max(0, end - span)]) / min(end, span) for end in range(1, len(sums))]


def sizes_panel(axis: Any, curves: dict[str, dict[str, float]], metric: str, label: str, title: str = "") -> None:
    """Draw results over the size of the long memory, a line for each name of ``curves``."""
    for name, losses in curves.items():
        results = [MEASURES[metric](loss) for loss in losses.values()]
        axis.plot([int(size) for size in losses], results, marker="o", ms=4, label=name)
    axis.set(xlabel="contexts in long memory", ylabel=label, title=title or "size of long memory")
    finish_size_axis(axis, {int(size) for losses in curves.values() for size in losses})


def weights_panel(axis: Any, weights: dict[str, MeanWeights], key: str, labels: tuple[str, str]) -> None:
    """Draw a line for each memory whose weights are known by ``key``; ``labels`` are those of the axis and the panel."""
    buckets = [*dict.fromkeys(cell.bucket for each in weights.values() for cell in getattr(each, key))]
    buckets = [bucket for bucket in buckets if bucket != AVERAGE]
    # Memories may know different lengths of context: their union is put in order.
    if all(bucket.isdecimal() for bucket in buckets):
        buckets.sort(key=int)
    colours = memory_colours(weights)
    for name, each in weights.items():
        points = means_of(getattr(each, key))
        if places := sorted(map(buckets.index, points)):
            axis.plot(places, [points[buckets[place]] for place in places], marker="o", ms=4, label=name, color=colours[name])
    axis.set_xticks(range(len(buckets)), buckets)
    axis.set(xlabel=labels[0], ylabel="mean weight, %", ylim=(0, None), title=labels[1])
    if key == "by_similarity":
        axis.tick_params(axis="x", rotation=45, labelsize=8)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
