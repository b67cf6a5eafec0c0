"""What each memory of a fitted mixture is worth: perplexity with and without it, what it costs, where its weight lies."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from trime.metrics import MEASURES
from trime.report.differences import Difference, apart
from trime.report.figures.canvas import Panel, canvas, fill, saved
from trime.report.page import COLOURS, Section, Table, pictured
from trime.report.tables import Lines, evaluated, markdown, unit

NOTE = (
    "Without a memory the mixture is fitted anew on dev to the others. Time is the memory's own; MB are the most that it held, "
    "of a datastore those on disk, its index included."
)


def memories_table(results: dict[str, Any]) -> tuple[list[str], Lines]:
    """A line for the vocabulary and for each memory."""
    found, kind = results["subsets"], unit(results["metrics"]["test"][-1])
    weights = found["weights"]
    header = ["memory", f"test {kind} without it", "change with it, 95 % interval", "MB", "µs a token", "largest weight, %"]
    encoding = f"{1e6 * found['encode_seconds_per_token']:,.0f}"
    lines = [["vocabulary (the model)", "", "", "", encoding, f"{100 * weights['vocabulary']['largest']:.1f}"]]
    for name, cost in found["memories"].items():
        without, added = worth([results], name)
        costs = [f"{cost['bytes'] / 1e6:,.1f}", f"{1e6 * cost['seconds_per_token']:,.1f}"]
        lines.append([name, f"{without:.2f}", str(added), *costs, f"{100 * weights[name]['largest']:.1f}"])
    return header, lines


def worth(runs: list[dict[str, Any]], memory: str) -> tuple[float, Difference]:
    """Return test perplexity (or bits) without a memory, and what it adds to the others: of one experiment, a seed each."""
    kind, losses, sides = unit(runs[0]["metrics"]["test"][-1]), [], []
    for found in (run["subsets"] for run in runs):
        every = found["subsets"][-1]
        if memory not in every["memories"]:
            raise LookupError(f"{memory} is not among {', '.join(every['memories'])}")
        rest = set(every["memories"]) - {memory}
        (without,) = (one for one in found["subsets"] if set(one["memories"]) == rest)
        losses.append(without["loss"])
        sides.append([every["documents"], without["documents"]])
    return mean(MEASURES[kind](loss) for loss in losses), apart(np.array(sides), kind)


def title(results: dict[str, Any]) -> str:
    """What the table is of."""
    kind = unit(results["metrics"]["test"][-1])
    loss = results["subsets"]["subsets"][-1]["loss"]
    return f"What each memory is worth ({results['subsets']['mixture']} mixture of all: test {kind} {MEASURES[kind](loss):.2f})"


def memories_text(results: dict[str, Any]) -> str:
    """The table in Markdown."""
    return f"{title(results)}:\n\n{markdown(*memories_table(results))}\n{NOTE}\n"


def memories_section(results: dict[str, Any]) -> list[Section]:
    """Table and pictures of a page, where the run has a fitted mixture."""
    if "subsets" not in results:
        return []
    return [Section(title(results), NOTE, [Table(*memories_table(results))]), *pictured("Weights", weights_panels(results))]


def memories_picture(results: dict[str, Any], path: Path) -> Path:
    """All panels of weights, side by side."""
    panels = weights_panels(results)
    figure, axes = canvas(1 + 6 * len(panels), 4, len(panels))
    fill(axes, panels)
    figure.suptitle(f"{results['name']} on {evaluated(results)[0]}, seed {results['seed']}: weights on test")
    return saved(figure, path)


def weights_panels(results: dict[str, Any]) -> list[Panel]:
    """Mean weights by frequency of the token, by similarity of the best entry, by longest context of n-grams."""
    weights = results["subsets"]["weights"]
    parts = {
        "by_frequency": ("frequency of the token on dev", "by frequency"),
        "by_similarity": ("similarity of the best entry, rank among dev's", "by similarity of the best entry"),
        "by_context": ("longest known context of n-grams, tokens", "by length of context"),
    }
    shown = {key: [name for name, own in weights.items() if key in own] for key in parts}
    return [partial(weights_panel, weights=weights, key=key, said=parts[key]) for key, names in shown.items() if names]


def weights_panel(axis: Any, weights: dict[str, Any], key: str, said: tuple[str, str]) -> None:
    """A line for each memory that is known by ``key``."""
    cells = {name: {cell["bucket"]: cell["mean"] for cell in own.get(key, [])} for name, own in weights.items()}
    buckets = [bucket for bucket in dict.fromkeys(bucket for own in cells.values() for bucket in own) if bucket != "average"]
    if all(bucket.isdecimal() for bucket in buckets):  # lengths, of memories that know different ones
        buckets.sort(key=int)
    for name, own in cells.items():
        known = [place for place, bucket in enumerate(buckets) if own.get(bucket) is not None]
        if known:
            points = [100 * own[buckets[place]] for place in known]
            axis.plot(known, points, marker="o", ms=4, label=name, color=COLOURS.get(name))
    axis.set_xticks(range(len(buckets)), buckets)
    axis.set(xlabel=said[0], ylabel="mean weight, %", ylim=(0, None), title=said[1])
    if key == "by_similarity":
        axis.tick_params(axis="x", rotation=45, labelsize=8)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
