"""The mean weights of memories in a fitted mixture."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from trime.report.figures.base import Figure
from trime.report.figures.canvas import COLOURS, Panel


class Weights(Figure):
    """How much a fitted mixture relies on each memory, by what is known of the token."""

    title = "Weights"
    note = (
        "By similarity, the tokens are those whose best entry in a memory is least (0–10 %) to most similar (90–100 %). "
        "A weight may fall there: weights sum to one, and where a memory matches best, another often matches even better."
    )

    def panels(self, results: dict[str, Any], history: Path) -> list[Panel]:
        return weights_panels(results)


def weights_panels(results: dict[str, Any]) -> list[Panel]:
    """Return the panels of mean weights: by frequency of the token, similarity of the best entry, length of n-gram context.

    There are none if the run has no fitted mixture.
    """
    if "subsets" not in results:
        return []
    weights = results["subsets"]["weights"]
    axes = {
        "by_frequency": ("frequency of the token on dev", "by frequency"),
        "by_similarity": (
            "tenths of dev, the least similar best entry first",
            "by similarity of the best entry",
        ),
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
