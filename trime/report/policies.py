"""Question-answering runs by eviction policy: table, curves over the memory's size, results by depth and length."""

from __future__ import annotations

from functools import partial
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from trime.metrics import share_interval
from trime.report.answers import Runs, counted, label_runs, measure_of, measures, query_size_text, result_row
from trime.report.figures.canvas import GREY, Panel, finish_size_axis
from trime.report.tables import TableRows

INK = "#1d2733"  # of numbers in coloured cells, on a dark page too
Key = tuple[str, int | None, int, str]  # what a cell of a table is of: label, words of a context, M, N


class Cell(NamedTuple):
    """The share of questions that were answered, the mean over seeds, and the number of questions of all seeds together."""

    share: float
    questions: int

    def __str__(self) -> str:
        low, high = (100 * end for end in share_interval(self.share, self.questions))
        return f"{100 * self.share:.1f} [{low:.1f}, {high:.1f}]"


def cells_by_policy(runs: Runs) -> dict[str, dict[Key, Cell]]:
    """Return the results of each policy by what they are of, averaged over seeds; truncated inputs are left out."""
    found: dict[str, dict[Key, list[Cell]]] = {}
    for label, run in label_runs(runs):
        row = result_row(run)
        if isinstance(row["memory_size"], int) and not row["max_prompt_tokens"]:
            key = (label, run["questions"].get("words"), row["memory_size"], query_size_text(row))
            found.setdefault(row["eviction"], {}).setdefault(key, []).append(Cell(counted(run)[1], row["questions"]))
    return {
        policy: {key: Cell(mean(c.share for c in cells), sum(c.questions for c in cells)) for key, cells in by_key.items()}
        for policy, by_key in found.items()
    }


def keys_of(cells: dict[str, dict[Key, Cell]]) -> list[Key]:
    """Return what the cells of any policy are of, in order of label, N, words and M."""
    return sorted({key for by_key in cells.values() for key in by_key}, key=lambda key: (key[0], key[3], key[1] or 0, key[2]))


def policies_table(runs: Runs) -> tuple[list[str], TableRows]:
    """Return header and lines of the share of answered questions in per cent: a line a policy, the worst first."""
    cells = cells_by_policy(runs)
    keys = keys_of(cells)
    several = [len({key[part] for key in keys}) > 1 for part in range(4)]  # what needs to be said in the columns' titles
    header = [
        ", ".join(
            text
            for text, is_needed in (
                (name, several[0]),
                (f"{words or 'all'} words", several[1]),
                (f"M {size}", True),
                (f"N {queries}", several[3]),
            )
            if is_needed
        )
        for name, words, size, queries in keys
    ]
    ranked = sorted(cells, key=lambda policy: mean(cell.share for cell in cells[policy].values()))
    return ["eviction", *header], [[policy, *(str(cells[policy].get(key, "")) for key in keys)] for policy in ranked]


def answers_panels(runs: Runs) -> list[Panel]:
    """Return a panel of results over M for each model, context length and N; none if no policy has several sizes."""
    cells = cells_by_policy(runs)
    panels: list[Panel] = []
    for name, words, queries in dict.fromkeys((name, words, queries) for name, words, _, queries in keys_of(cells)):
        lines = {
            policy: {size: cell for (*rest, size, last), cell in by_key.items() if (*rest, last) == (name, words, queries)}
            for policy, by_key in cells.items()
        }
        title = f"{name}, {words or 'all'} words, N {queries}"
        if any(len(points) > 1 for points in lines.values()):
            panels.append(partial(answers_panel, lines=lines, title=title, measure=measures(runs)))
    return panels


def answers_panel(axis: Any, lines: dict[str, dict[int, Cell]], title: str, measure: str) -> None:
    """Draw the results of each policy over M, in the order of their last points."""
    drawn = sorted((policy for policy in lines if lines[policy]), key=lambda policy: -max(lines[policy].items())[1].share)
    for number, policy in enumerate(drawn):
        points = [(size, 100 * cell.share) for size, cell in sorted(lines[policy].items())]
        style = {"color": GREY} if policy == "fifo" else {"color": f"C{number % 10}", "ls": ("-", "--")[number // 10 % 2]}
        axis.plot(*zip(*points, strict=True), marker="o", ms=4, label=policy, **style)
    axis.set(xlabel="entries M per layer", ylabel=f"{measure}, %", ylim=(0, 105))
    axis.set_title(title, fontsize=10)
    finish_size_axis(axis, sorted({size for points in lines.values() for size in points}))


def depth_panels(runs: Runs) -> list[Panel]:
    """Return a panel of results by depth and length for each label, policy and M that has several lengths."""
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for label, run in label_runs(runs):
        row = result_row(run)
        if row.get("by_depth") and isinstance(row["memory_size"], int):
            found.setdefault((label, row["eviction"], row["memory_size"]), []).append(run)
    several = len({label for label, _, _ in found}) > 1
    return [
        partial(depth_panel, runs=group, title=", ".join([*[label] * several, policy, f"M {size}"]))
        for (label, policy, size), group in sorted(found.items())
        if len({result_row(run)["prompt_tokens"] for run in group}) > 1
    ]


def depth_panel(axis: Any, runs: Runs, title: str) -> None:
    """Draw the share of answered questions in per cent by the length of the prompt and the depth of the answer in it."""
    cells: dict[tuple[int, float], list[tuple[float, int]]] = {}
    for run in runs:
        row = result_row(run)
        for part in row["by_depth"]:
            cells.setdefault((row["prompt_tokens"], part["depth"]), []).append((part[measure_of(run)], part["questions"]))
    lengths, depths = (sorted({key[place] for key in cells}) for place in (0, 1))
    shares = np.full((len(depths), len(lengths)), np.nan)
    for (length, depth), parts in cells.items():
        share = sum(share * count for share, count in parts) / sum(count for _, count in parts)
        shares[depths.index(depth), lengths.index(length)] = 100 * share
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=130, aspect="auto")  # so that black numbers are legible on every blue
    for (line, column), share in np.ndenumerate(shares):
        if not np.isnan(share):
            axis.text(column, line, f"{share:.0f}", ha="center", va="center", fontsize=8, color=INK)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
    axis.set(xlabel="tokens of the prompt", ylabel="depth of the answer")
    axis.set_title(f"{title}: {measures(runs)}, %", fontsize=10)
