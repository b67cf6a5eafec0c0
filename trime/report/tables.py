"""Tables of runs, as Markdown and CSV, beside the paper's figures where a row is a published one."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable
from typing import Any

from trime.metrics import MEASURES

Lines = list[list[str]]


def markdown(header: list[str], lines: Lines) -> str:
    """A Markdown table with aligned columns, numbers to the right."""
    widths = [max(2, *(len(line[i]) for line in [header, *lines])) for i in range(len(header))]
    right = [i > 0 and is_numeric([line[i] for line in lines]) for i in range(len(header))]

    def joined(line: list[str]) -> str:
        cells = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)]
        return f"| {' | '.join(cells)} |"

    rule = ["-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)]
    return "\n".join([joined(header), f"| {' | '.join(rule)} |", *map(joined, lines)]) + "\n"


def is_numeric(cells: list[str]) -> bool:
    """A column of figures, some of which may be missing."""
    filled = [re.fullmatch(r"[-+]?[\d,.]+( / [\d.]+)?", cell) for cell in cells if cell]
    return bool(filled) and all(filled)


def csv_of(header: list[str], lines: Lines) -> str:
    """The same as CSV."""
    out = io.StringIO()
    csv.writer(out).writerows([header, *lines])
    return out.getvalue()


def measure(row: dict[str, Any]) -> float:
    """Bits per character where tokens are characters, else perplexity."""
    return row.get("bits_per_character", row["perplexity"])


def unit(row: dict[str, Any]) -> str:
    return "bits/char" if "bits_per_character" in row else "perplexity"


def units(runs: list[dict[str, Any]]) -> str:
    """What the runs are measured in; words and bytes may stand side by side."""
    return " or ".join(sorted({unit(run["metrics"]["test"][-1]) for run in runs}, reverse=True))


EDGE = "‡"  # marks a row whose tuned setting lies at the edge of its grid
EDGE_NOTE = f"{EDGE} the best setting lies at the edge of its grid: a better one may lie beyond, widen tune.*"


FITTED_NOTE = (
    "adaptive and calibrated rows are the lab's own: a mixture of all memories that was fitted on dev, whose dev figure is of "
    "documents that a fit did not see"
)


def marked(name: str, rows: Iterable[dict[str, Any]]) -> str:
    """Return a row's name, marked where some of its dev rows were tuned to the edge of a grid."""
    return f"{name} {EDGE}" if any(row.get("at_edge") for row in rows) else name


LETTERS = {  # of the paper, for what is tuned
    "temperature": "τ",
    "interpolation_temperature": "τ'",
    "lambda": "λ",
    "cache_temperature": "τ' cache",
    "cache_lambda": "λ cache",
    "memory_size": "M",
    "k": "K",
}


def edges_text(rows: Iterable[dict[str, Any]]) -> str:
    """Return which settings of dev rows lie at the edge of their grid, in the paper's letters."""
    return ", ".join(dict.fromkeys(LETTERS[name] for row in rows for name in row.get("at_edge", [])))


def tuned_text(row: dict[str, Any], at_edge: list[str]) -> str:
    """Return what was tuned in the paper's letters, settings at the edge of their grid marked."""
    return ", ".join(f"{LETTERS[name]} {value:g}{EDGE * (name in at_edge)}" for name, value in row["tuned"].items())


def run_table(results: dict[str, Any]) -> tuple[list[str], Lines]:
    """Every row of one run, dev and test."""
    pairs = list(zip(results["metrics"]["valid"], results["metrics"]["test"], strict=True))
    translated = "bleu" in pairs[0][1]
    header = [
        "memories",
        *(["dev BLEU", "test BLEU"] if translated else []),
        f"dev {unit(pairs[0][0])}",
        f"test {unit(pairs[0][1])}",
        "tokens",
        "search",
        "tokens/s",
        "tuned on dev",
    ]
    return header, [
        [
            test["memories"],
            *([f"{valid['bleu']:.2f}", f"{test['bleu']:.2f}"] if translated else []),
            f"{measure(valid):.2f}",
            f"{measure(test):.2f}",
            f"{test['tokens']:,}",
            test["search"] or "",
            f"{test['tokens_per_second']:,.0f}",
            tuned_text(test, valid.get("at_edge", [])),
        ]
        for valid, test in pairs
    ]


def analysis_text(results: dict[str, Any]) -> str:
    """Loss by frequency on dev (TRIME Table 14), retrieval accuracy (Table 13), sizes of long memory (Figure 3)."""
    kind = unit(results["metrics"]["test"][-1])
    return "\n".join(f"On {split}:\n\n{split_text(found, kind)}" for split, found in results["analysis"].items())


def split_text(analysis: dict[str, Any], kind: str) -> str:
    """The tables of one split, in perplexity or bits."""
    buckets, parts = analysis["buckets"], []
    names = [cell["bucket"] for cell in next(iter(buckets.values()))]
    tokens = ["tokens", *(f"{cell['tokens']:,}" for cell in next(iter(buckets.values())))]
    lines = [[label, *(figure(cell["loss"], kind) for cell in cells)] for label, cells in buckets.items()]
    parts.append(markdown([f"{kind} by frequency on dev", *names], [*lines, tokens]))
    if analysis["retrieval"]:
        shares = [f"{100 * share:.2f}" for share in analysis["retrieval"].values()]
        parts.append(
            markdown(["retrieval accuracy, %", *(f"top {k}" for k in analysis["retrieval"])], [["datastore", *shares]])
        )
    if analysis["by_memory_size"]:
        curve = analysis["by_memory_size"]
        parts.append(markdown(["size of long memory", *curve], [[kind, *(figure(loss, kind) for loss in curve.values())]]))
    return "\n".join(parts)


def replay_text(found: dict[str, Any]) -> str:
    """What each policy's memory retains of attention mass, and the perplexity it gives, by size."""
    kind = "exact" if found["exact"] else "approximate: evictions in one layer would change the others' activations"
    parts = []
    for memory in found["memories"]:
        for title, value in replayed(found["unit"]).items():
            sizes, names = (list(dict.fromkeys(row[key] for row in memory["rows"])) for key in ("size", "policy"))
            cells = {(row["policy"], row["size"]): value(row) for row in memory["rows"]}
            lines = [[name, *(f"{cells[name, size]:.2f}" for size in sizes)] for name in names]
            parts.append(f"{memory['memory']}, {title} ({kind}):\n\n" + markdown(["entries", *map(str, sizes)], lines))
    return "\n".join(parts)


def replayed(kind: str | None) -> dict[str, Callable[[dict[str, Any]], float]]:
    """What a replay tells of a row, by title; ``kind`` is the unit of losses, where there are any."""
    found: dict[str, Callable[[dict[str, Any]], float]] = {"retained attention mass, %": lambda row: 100 * row["retained"]}
    if kind:
        found[f"test {kind}"] = lambda row: MEASURES[kind](row["loss"])
    return found


def figure(loss: float | None, kind: str) -> str:
    """A loss in a unit with two decimals, or nothing where there is none."""
    return "" if loss is None else f"{MEASURES[kind](loss):.2f}"


def evaluated(run: dict[str, Any]) -> tuple[str, str, int, int | None]:
    """Name and fingerprint of the text the run was evaluated on, how many tokens of it, and of how many kinds."""
    dataset = run.get("evaluated", run["dataset"])
    return dataset["name"], dataset["fingerprint"], run["metrics"]["test"][-1]["tokens"], dataset.get("vocabulary")
