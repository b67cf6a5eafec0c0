"""The contribution of each memory to a fitted mixture: perplexity with and without it, its cost, and its weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from trime.metrics import MEASURES
from trime.report.differences import Difference, paired_bootstrap
from trime.report.figures.canvas import Panel, canvas, fill_axes, save_picture
from trime.report.page import COLOURS, Section, Table, picture_sections
from trime.report.tables import Lines, evaluated_text, markdown, metric_name

NOTE = (
    "Without a memory, the mixture is fitted again on dev with the others. Time is that of the memory alone; MB are its peak "
    "size, and for a datastore its size on disk, including the index."
)


def memories_table(results: dict[str, Any]) -> tuple[list[str], Lines]:
    """Return header and lines of the table: a line for the vocabulary and one for each memory."""
    subsets, metric = results["subsets"], metric_name(results["metrics"]["test"][-1])
    weights = subsets["weights"]
    header = ["memory", f"test {metric} without it", "change with it, 95 % interval", "MB", "µs/token", "largest weight, %"]
    encoding = f"{1e6 * subsets['encode_seconds_per_token']:,.0f}"
    lines = [["vocabulary (the model)", "", "", "", encoding, f"{100 * weights['vocabulary']['largest']:.1f}"]]
    for name, cost in subsets["memories"].items():
        without, added = memory_contribution([results], name)
        costs = [f"{cost['bytes'] / 1e6:,.1f}", f"{1e6 * cost['seconds_per_token']:,.1f}"]
        lines.append([name, f"{without:.2f}", str(added), *costs, f"{100 * weights[name]['largest']:.1f}"])
    return header, lines


def memory_contribution(runs: list[dict[str, Any]], memory: str) -> tuple[float, Difference]:
    """Return test perplexity (or bits) without a memory, and the change with it; ``runs`` are one experiment's seeds."""
    metric, losses, sides = metric_name(runs[0]["metrics"]["test"][-1]), [], []
    for subsets in (run["subsets"]["subsets"] for run in runs):
        full = subsets[-1]
        if memory not in full["memories"]:
            raise LookupError(f"{memory} is not among {', '.join(full['memories'])}")
        rest = set(full["memories"]) - {memory}
        (without,) = (subset for subset in subsets if set(subset["memories"]) == rest)
        losses.append(without["loss"])
        sides.append([full["documents"], without["documents"]])
    return mean(MEASURES[metric](loss) for loss in losses), paired_bootstrap(np.array(sides), metric)


def table_title(results: dict[str, Any]) -> str:
    """Return the title of the table, which names the mixture and its result."""
    metric = metric_name(results["metrics"]["test"][-1])
    loss = results["subsets"]["subsets"][-1]["loss"]
    mixture = results["subsets"]["mixture"]
    return f"Contribution of each memory ({mixture} mixture of all: test {metric} {MEASURES[metric](loss):.2f})"


def memories_text(results: dict[str, Any]) -> str:
    """Return the table in Markdown, with title and note."""
    return f"{table_title(results)}:\n\n{markdown(*memories_table(results))}\n{NOTE}\n"


def memories_section(results: dict[str, Any]) -> list[Section]:
    """Return the page's sections with table and pictures, none if the run has no fitted mixture."""
    if "subsets" not in results:
        return []
    return [
        Section(table_title(results), NOTE, [Table(*memories_table(results))]),
        *picture_sections("Weights", weights_panels(results)),
    ]


def memories_picture(results: dict[str, Any], path: Path) -> Path:
    """Draw all panels of weights side by side."""
    panels = weights_panels(results)
    figure, axes = canvas(1 + 6 * len(panels), 4, len(panels))
    fill_axes(axes, panels)
    figure.suptitle(f"{results['name']} on {evaluated_text(results)[0]}, seed {results['seed']}: weights on test")
    return save_picture(figure, path)


def weights_panels(results: dict[str, Any]) -> list[Panel]:
    """Return the panels of mean weights: by frequency of the token, similarity of the best entry, length of n-gram context."""
    weights = results["subsets"]["weights"]
    axes = {
        "by_frequency": ("frequency of the token on dev", "by frequency"),
        "by_similarity": ("similarity of the best entry, quantile on dev", "by similarity of the best entry"),
        "by_context": ("longest matching n-gram context, tokens", "by length of the matching context"),
    }
    present = [key for key in axes if any(key in by_key for by_key in weights.values())]
    return [partial(weights_panel, weights=weights, key=key, labels=axes[key]) for key in present]


def weights_panel(axis: Any, weights: dict[str, Any], key: str, labels: tuple[str, str]) -> None:
    """Draw a line for each memory whose weights are known by ``key``; ``labels`` are those of the axis and the panel."""
    cells = {name: {cell["bucket"]: cell["mean"] for cell in by_key.get(key, [])} for name, by_key in weights.items()}
    buckets = [
        bucket for bucket in dict.fromkeys(bucket for means in cells.values() for bucket in means) if bucket != "average"
    ]
    if all(bucket.isdecimal() for bucket in buckets):  # lengths, which may differ between memories
        buckets.sort(key=int)
    for name, means in cells.items():
        known = [place for place, bucket in enumerate(buckets) if means.get(bucket) is not None]
        if known:
            points = [100 * means[buckets[place]] for place in known]
            axis.plot(known, points, marker="o", ms=4, label=name, color=COLOURS.get(name))
    axis.set_xticks(range(len(buckets)), buckets)
    axis.set(xlabel=labels[0], ylabel="mean weight, %", ylim=(0, None), title=labels[1])
    if key == "by_similarity":
        axis.tick_params(axis="x", rotation=45, labelsize=8)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
