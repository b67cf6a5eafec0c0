"""The contribution of each memory to a fitted mixture: perplexity with and without it, and its cost."""

from __future__ import annotations

from statistics import mean
from typing import Any

import numpy as np

from trime.metrics import MEASURES
from trime.report.bootstrap import Difference, paired_bootstrap
from trime.report.page import Section, Table
from trime.report.tables import TableRows, decimals, markdown, metric_name

NOTE = (
    "Without a memory, the mixture is fitted again on dev with the others. Time is that of the memory alone; MB are its peak "
    "size, and for a datastore its size on disk, including the index."
)


def memories_table(results: dict[str, Any]) -> tuple[list[str], TableRows]:
    """Return header and lines of the table: a line for the vocabulary and one for each memory."""
    subsets, metric = results["subsets"], metric_name(results["metrics"]["test"][-1])
    weights = subsets["weights"]
    header = ["memory", f"test {metric} without it", "change with it, 95 % interval", "MB", "µs/token", "largest weight, %"]
    encoding = f"{1e6 * subsets['encode_seconds_per_token']:,.0f}"
    lines = [["vocabulary (the model)", "", "", "", encoding, f"{100 * weights['vocabulary']['largest']:.1f}"]]
    for name, cost in subsets["costs"].items():
        without, added = memory_contribution([results], name)
        costs = [f"{cost['bytes'] / 1e6:,.1f}", f"{1e6 * cost['seconds_per_token']:,.1f}"]
        lines.append([name, decimals(without), str(added), *costs, f"{100 * weights[name]['largest']:.1f}"])
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
    return MEASURES[metric](mean(losses)), paired_bootstrap(np.array(sides), metric)


def table_title(results: dict[str, Any]) -> str:
    """Return the title of the table, which names the mixture and its result."""
    metric = metric_name(results["metrics"]["test"][-1])
    loss = results["subsets"]["subsets"][-1]["loss"]
    mixture = results["subsets"]["mixture"]
    return f"Contribution of each memory ({mixture} mixture of all: test {metric} {decimals(MEASURES[metric](loss))})"


def memories_text(results: dict[str, Any]) -> str:
    """Return the table in Markdown, with title and note."""
    return f"{table_title(results)}:\n\n{markdown(*memories_table(results))}\n{NOTE}\n"


def memories_section(results: dict[str, Any]) -> list[Section]:
    """Return the page's section with the table as a list, which is empty if the run has no fitted mixture."""
    return [Section(table_title(results), NOTE, [Table(*memories_table(results))])] if "subsets" in results else []
