"""Tables of one run as Markdown and CSV, and how their values are formatted."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trime.metrics import MEASURES, bits

TableRows = list[list[str]]

INTERVAL_CELL = re.compile(r"([-+]?[\d.]+) (?:\[([-+]?[\d.]+), ([-+]?[\d.]+)\]|one part)")
PAIR_CELL = re.compile(r"(?:([\d.]+) / )?([\d.]+)$")  # published results: dev / test, or test alone
THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")


def markdown(header: list[str], lines: TableRows) -> str:
    """Return a Markdown table with aligned columns, those of numbers to the right."""
    widths = [max(2, *(len(line[i]) for line in [header, *lines])) for i in range(len(header))]
    right = [i > 0 and is_numeric([line[i] for line in lines]) for i in range(len(header))]

    def joined(line: list[str]) -> str:
        cells = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)]
        return f"| {' | '.join(cells)} |"

    rule = ["-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)]
    return "\n".join([joined(header), f"| {' | '.join(rule)} |", *map(joined, lines)]) + "\n"


def is_numeric(cells: list[str]) -> bool:
    """Return True if all cells that are not empty hold numbers."""
    filled = [re.fullmatch(r"[-+]?[\d,.]+( / [\d.]+)?", cell) for cell in cells if cell]
    return bool(filled) and all(filled)


def to_csv(header: list[str], lines: TableRows) -> str:
    """Return a table as CSV, with plain numbers: no separators of thousands, an interval in columns of its own."""
    columns = [column for i, title in enumerate(header) for column in plain_columns(title, [line[i] for line in lines])]
    out = io.StringIO()
    csv.writer(out).writerow([title for title, _ in columns])
    csv.writer(out).writerows(zip(*(cells for _, cells in columns), strict=True))
    return out.getvalue()


def plain_columns(title: str, cells: list[str]) -> list[tuple[str, list[str]]]:
    """Return a column as columns of plain numbers: a result, its interval's low and high end; dev and test results."""
    for pattern, names in ((INTERVAL_CELL, ("", ", low", ", high")), (PAIR_CELL, (", dev", ", test"))):
        found = [pattern.match(cell) for cell in cells]
        if any(match and match[1] for match in found):
            parts = [[(match[i] or "") if match else "" for match in found] for i in range(1, len(names) + 1)]
            return [(title + name, part) for name, part in zip(names, parts, strict=True)]
    return [(title, [cell.replace(",", "") if THOUSANDS.fullmatch(cell) else cell for cell in cells])]


PROCESSOR_KEY = "processor_ms_per_token"
PROCESSOR_TIME = "processor ms/token"  # elapsed time would count what else the machine was doing


def processor_text(row: dict[str, Any]) -> str:
    """Return the processor time of a row as tables print it; nothing for results of earlier versions, which lack it."""
    milliseconds = row.get(PROCESSOR_KEY)
    return "" if milliseconds is None else f"{milliseconds:,.3f}"


NOT_FINITE = "not finite"  # in place of nan, which results of earlier versions may hold


def decimals(value: float) -> str:
    """Return a result with two decimals, as tables print it, or that it is not finite."""
    return f"{value:.2f}" if math.isfinite(value) else NOT_FINITE


def metric_value(row: dict[str, Any]) -> float:
    """Return a row's result in its metric."""
    return bits(row["loss"]) if metric_name(row) == "bits/byte" else row.get("bits_per_character", row["perplexity"])


def metric_name(row: dict[str, Any]) -> str:
    """Return the name of a row's metric: bits/char or bits/byte if its tokens are characters or bytes, else perplexity."""
    return row.get("metric", "bits/char" if "bits_per_character" in row else "perplexity")


def metric_names(runs: list[dict[str, Any]]) -> str:
    """Return the metrics of several runs, as in ``perplexity or bits/char``."""
    return " or ".join(sorted({metric_name(run["metrics"]["test"][-1]) for run in runs}, reverse=True))


EDGE = "‡"  # marks a row with a tuned setting at the edge of its grid
EDGE_NOTE = (
    f"{EDGE} The best setting lies at the edge of its grid. A wider one may hold a better: for λ 0.02, for instance, "
    "tune.interpolation_share='[0.005,0.01,0.02,0.05]'."
)
FITTED_NOTE = (
    "Rows with a fitted mixture (adaptive, calibrated) are not in the papers. The mixture is fitted on dev, so their dev "
    "result is cross-validated (each document, or block of the text if there are few, is scored by a fit that did not see it)."
)


def applicable(notes: Mapping[str, bool]) -> list[str]:
    """Return the notes that are not empty and apply, given whether each does."""
    return [note for note, applies in notes.items() if note and applies]


def mark_edge(name: str, rows: Iterable[dict[str, Any]]) -> str:
    """Return a name, marked if one of its dev rows was tuned to the edge of a grid."""
    return f"{name} {EDGE}" if any(row.get("at_grid_edge") for row in rows) else name


SYMBOLS = {  # the papers' symbols of tuned settings
    "temperature": "τ",
    "interpolation_temperature": "τ'",
    "lambda": "λ",
    "cache_temperature": "τ' cache",
    "cache_lambda": "λ cache",
    "memory_size": "M",
    "k": "K",
}


def edge_settings(rows: Iterable[dict[str, Any]]) -> str:
    """Return the symbols of the settings of dev rows that were tuned to the edge of their grid."""
    return ", ".join(dict.fromkeys(SYMBOLS[name] for row in rows for name in row.get("at_grid_edge", [])))


def tuned_text(row: dict[str, Any], at_edge: list[str]) -> str:
    """Return a row's tuned settings with the papers' symbols; those at the edge of their grid are marked."""
    return ", ".join(f"{SYMBOLS[name]} {value:g}{EDGE * (name in at_edge)}" for name, value in row["tuned"].items())


def run_table(results: dict[str, Any]) -> tuple[list[str], TableRows]:
    """Return header and lines of a run's table: each row on test and dev, with dev's tokens where rows have other ones."""
    pairs = list(zip(results["metrics"]["valid"], results["metrics"]["test"], strict=True))
    translated, differ = "bleu" in pairs[0][1], len({valid["tokens"] for valid, _ in pairs}) > 1  # by mixture.tokens
    timed = any(processor_text(test) for _, test in pairs)
    header = [
        "memories",
        *(["test BLEU", "dev BLEU"] if translated else []),
        f"test {metric_name(pairs[0][1])}",
        f"dev {metric_name(pairs[0][0])}",
        "tokens",
        *(["dev tokens"] if differ else []),
        "search",
        *([PROCESSOR_TIME] if timed else []),
        "tuned on dev",
    ]
    return header, [
        [
            test["memories"],
            *([f"{test['bleu']:.2f}", f"{valid['bleu']:.2f}"] if translated else []),
            decimals(metric_value(test)),
            decimals(metric_value(valid)),
            f"{test['tokens']:,}",
            *([f"{valid['tokens']:,}"] if differ else []),
            test["search"] or "",
            *([processor_text(test)] if timed else []),
            tuned_text(test, valid.get("at_grid_edge", [])),
        ]
        for valid, test in pairs
    ]


def analysis_text(results: dict[str, Any]) -> str:
    """Return the tables of an analysis: loss by frequency on dev (TRIME Table 14), retrieval accuracy (Table 13), loss by size
    of the long memory (Figure 3).
    """
    metric = metric_name(results["metrics"]["test"][-1])
    return "\n".join(f"On {split}:\n\n{split_tables(analysis, metric)}" for split, analysis in results["analysis"].items())


def split_tables(analysis: dict[str, Any], metric: str) -> str:
    """Return the analysis tables of one split."""
    buckets, parts = analysis["buckets"], []
    names = [cell["bucket"] for cell in next(iter(buckets.values()))]
    tokens = ["tokens", *(f"{cell['tokens']:,}" for cell in next(iter(buckets.values())))]
    lines = [[label, *(format_loss(cell["loss"], metric) for cell in cells)] for label, cells in buckets.items()]
    parts.append(markdown([f"{metric} by frequency on dev", *names], [*lines, tokens]))
    if analysis["retrieval"]:
        shares = [f"{100 * share:.2f}" for share in analysis["retrieval"].values()]
        parts.append(
            markdown(["retrieval accuracy, %", *(f"top {k}" for k in analysis["retrieval"])], [["datastore", *shares]])
        )
    if analysis["by_memory_size"]:
        curve = analysis["by_memory_size"]
        losses = [format_loss(loss, metric) for loss in curve.values()]
        parts.append(markdown(["contexts in long memory", *curve], [[metric, *losses]]))
    return "\n".join(parts)


def replay_text(results: dict[str, Any]) -> str:
    """Return the tables of a replay: the attention mass that each policy retains and its perplexity, by memory size."""
    accuracy = "exact" if results["exact"] else "approximate: evictions in one layer would change the activations of later ones"
    parts = []
    for memory in results["memories"]:
        for title, value in replay_metrics(results["unit"]).items():
            sizes, names = (list(dict.fromkeys(row[key] for row in memory["rows"])) for key in ("size", "policy"))
            cells = {(row["policy"], row["size"]): value(row) for row in memory["rows"]}
            lines = [[name, *(f"{cells[name, size]:.2f}" for size in sizes)] for name in names]
            parts.append(f"{memory['memory']}, {title} ({accuracy}):\n\n" + markdown(["entries", *map(str, sizes)], lines))
    return "\n".join(parts)


def replay_metrics(metric: str | None) -> dict[str, Callable[[dict[str, Any]], float]]:
    """Return what a replay measures, by title, as functions of a row; ``metric`` is None if it has no losses."""
    metrics: dict[str, Callable[[dict[str, Any]], float]] = {"retained attention mass, %": lambda row: 100 * row["retained"]}
    if metric:
        metrics[f"test {metric}"] = lambda row: MEASURES[metric](row["loss"])
    return metrics


def format_loss(loss: float | None, metric: str) -> str:
    """Return a loss converted to a metric, with two decimals; an empty cell for None."""
    return "" if loss is None else decimals(MEASURES[metric](loss))
