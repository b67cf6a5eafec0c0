"""Answering runs side by side: exact match by model and memories, and by policy over sizes (Attendre Tables 2 to 5)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from trime.report.figures.canvas import GREY, Panel, fill, over_sizes, saved, small_panels
from trime.report.tables import Lines

Rows = list[dict[str, Any]]


def answers_table(runs: Rows) -> tuple[list[str], Lines]:
    """Runs, the best first."""
    header = ["run", "seed", "exact match, %", "questions", "M", "N", "read alone", "eviction", "tokens/s", "peak MB"]
    lines = []
    for run in runs:
        row = own(run)
        figures = [f"{row['tokens_per_second']:,.0f}", f"{row['peak_memory_mb']:,.0f}"]
        match, last = f"{100 * row['exact_match']:.2f}", f"last {row['last']:,}" if row["last"] else ""
        sizes = [str(row["memory_size"]), waiting(row)]
        lines.append([run["name"], str(run["seed"]), match, f"{row['questions']:,}", *sizes, last, row["eviction"], *figures])
    return header, sorted(lines, key=lambda line: -float(line[2]))


def own(run: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run."""
    (row,) = next(iter(run["metrics"].values()))
    return row


def waiting(row: dict[str, Any]) -> str:
    """N as it was asked for."""
    return "default" if row["query_size"] is None else str(row["query_size"])


MEASURED = {"exact_match", "questions", "tokens", "tokens_per_second", "peak_memory_mb", "missing_evidence"}
SHOWN = {"memory_size", "query_size", "eviction", "last"}  # in columns of their own


def labelled(runs: Rows) -> list[tuple[str, dict[str, Any]]]:
    """Runs with their name, and what else runs of that name differ in but the seed: only equals are averaged."""
    rest = []
    for run in runs:
        asked = {name: value for name, value in run["questions"].items() if name not in ("seed", "words")}
        read = {name: value for name, value in own(run).items() if name not in MEASURED | SHOWN}
        asked |= run.get("answering", {})
        rest.append((run.get("taught") or {"model": run["model"]}) | asked | read)
    found = []
    for run, settings in zip(runs, rest, strict=True):
        others = [other for namesake, other in zip(runs, rest, strict=True) if namesake["name"] == run["name"]]
        differs = [name for name, value in settings.items() if any(other.get(name) != value for other in others)]
        found.append((", ".join([run["name"], *(f"{name} {settings[name]}" for name in differs)]), run))
    return found


def kinds(runs: Rows) -> dict[tuple[Any, ...], dict[str, float]]:
    """Exact match by what was read how (label, words of context, M, N), and by policy: the mean over seeds."""
    found: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for label, run in labelled(runs):
        row = own(run)
        if isinstance(row["memory_size"], int) and not row["last"]:
            kind = (label, run["questions"].get("words"), row["memory_size"], waiting(row))
            found.setdefault(kind, {}).setdefault(row["eviction"], []).append(row["exact_match"])
    order = sorted(found, key=lambda kind: (kind[0], kind[1] or 0, kind[3], kind[2]))
    return {kind: {policy: mean(values) for policy, values in found[kind].items()} for kind in order}


def policies_grid(runs: Rows) -> tuple[list[str], Lines]:
    """A line for each M and N, a column for each policy: exact match in per cent."""
    found = kinds(runs)
    policies = list(dict.fromkeys(policy for cells in found.values() for policy in cells))
    lines = [
        [name, str(words or ""), str(size), queries, *(f"{100 * cells[p]:.1f}" if p in cells else "" for p in policies)]
        for (name, words, size, queries), cells in found.items()
    ]
    return ["run", "words", "M", "N", *policies], lines


def answers_picture(runs: Rows, path: Path) -> Path:
    """Exact match over M, a panel for each way of reading."""
    panels = answers_panels(runs)
    figure, axes = small_panels(len(panels), 3)
    fill(axes, panels)
    return saved(figure, path)


def answers_panels(runs: Rows) -> list[Panel]:
    """One for each model, length of context and N."""
    found = kinds(runs)
    wanted = dict.fromkeys((name, words, queries) for name, words, _, queries in found)
    return [partial(answers_panel, found=found, wanted=own) for own in wanted]


def answers_panel(axis: Any, found: dict[tuple[Any, ...], dict[str, float]], wanted: tuple[Any, ...]) -> None:
    """A line for each policy."""
    cells = {size: own for (name, words, size, queries), own in found.items() if (name, words, queries) == wanted}
    for policy in dict.fromkeys(policy for own in cells.values() for policy in own):
        points = [(size, 100 * own[policy]) for size, own in sorted(cells.items()) if policy in own]
        style = {"color": GREY} if policy == "fifo" else {}
        axis.plot(*zip(*points, strict=True), marker="o", ms=4, label=policy, **style)
    name, words, queries = wanted
    axis.set(xlabel="entries M of each layer", ylabel="exact match, %", ylim=(0, 105))
    axis.set_title(f"{name}, {words or 'all'} words, N {queries}", fontsize=10)
    over_sizes(axis, sorted(cells))
