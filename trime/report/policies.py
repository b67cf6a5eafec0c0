"""Question-answering runs by eviction policy: table, curves over the memory's size, results by depth and length."""

from __future__ import annotations

import math
import textwrap
from functools import partial
from statistics import mean
from typing import Any

import numpy as np

from trime.metrics import share_interval
from trime.report.answers import Runs, Share, counted, label_runs, measure_of, measures, query_size_text, result_row
from trime.report.figures.canvas import BLUE, GREY, Panel, finish_size_axis, line_style
from trime.report.tables import TableRows

OPACITY = 0.6  # of a cell of 100 %, so that numbers in it are legible on a light page and on a dark one
TITLE_WIDTH = 55  # characters of a line above a panel
BESIDE = 1.02  # ratio of the places of two policies of the same size
Key = tuple[str, int | None, int, str]  # what a cell of a table is of: label, words of a context, M, N


def cells_by_policy(runs: Runs) -> dict[str, dict[Key, Share]]:
    """Return the results of each policy by what they are of, averaged over seeds; truncated inputs are left out."""
    return cells_of(label_runs(runs))


def cells_of(labelled: list[tuple[str, dict[str, Any]]]) -> dict[str, dict[Key, Share]]:
    """Return the results of labelled runs, by policy."""
    found: dict[str, dict[Key, list[Share]]] = {}
    for label, run in labelled:
        row = result_row(run)
        if isinstance(row["memory_size"], int) and not row["max_prompt_tokens"]:
            key = (label, run["questions"].get("words"), row["memory_size"], query_size_text(row))
            found.setdefault(row["eviction"], {}).setdefault(key, []).append(Share(counted(run)[1], row["questions"]))
    return {
        policy: {key: Share(mean(c.share for c in cells), sum(c.questions for c in cells)) for key, cells in by_key.items()}
        for policy, by_key in found.items()
    }


def keys_of(cells: dict[str, dict[Key, Share]]) -> list[Key]:
    """Return what the cells of any policy are of, in order of label, N, words and M."""
    return sorted({key for by_key in cells.values() for key in by_key}, key=lambda key: (key[0], key[3], key[1] or 0, key[2]))


def policies_table(runs: Runs) -> tuple[list[str], TableRows]:
    """Return header and lines of the share of answered questions in per cent: a line a policy, the worst first."""
    cells = cells_by_policy(runs)
    keys = keys_of(cells)
    several = [len({key[part] for key in keys}) > 1 for part in range(4)]
    header = [column_title(key, several) for key in keys]
    ranked = sorted(cells, key=lambda policy: mean(cell.share for cell in cells[policy].values()))
    return ["eviction", *header], [[policy, *(str(cells[policy].get(key, "")) for key in keys)] for policy in ranked]


def column_title(key: Key, several: list[bool]) -> str:
    """Return the title of a column: M, and of label, words and N what columns differ in."""
    name, words, size, queries = key
    label, length, waiting = [name], [f"{words or 'all'} words"], [f"N {queries}"]
    return ", ".join([*label * several[0], *length * several[1], f"M {size}", *waiting * several[3]])


def answers_panels(runs: Runs) -> list[Panel]:
    """Return a panel of results over M for each model, context length and N.

    There is none where M does not vary and no memory kept everything.
    """
    labelled, title = label_runs(runs), "{}, {} words, N {}"
    cells = cells_of([(label, run) for label, run in labelled if not keeps_all(run)])
    whole = cells_of([(label, run) for label, run in labelled if keeps_all(run)])
    panels: list[Panel] = []
    styles = {policy: policy_style(policy, number) for number, policy in enumerate(sorted(cells.keys() - {"fifo"}))}
    styles |= {"fifo": policy_style("fifo", 0)}
    for name, words, queries in dict.fromkeys((name, words, queries) for name, words, _, queries in keys_of(cells)):
        lines = {
            policy: {size: cell for (*rest, size, last), cell in by_key.items() if (*rest, last) == (name, words, queries)}
            for policy, by_key in cells.items()
        }
        kept = [
            cell
            for by_key in whole.values()
            for (*rest, _, last), cell in by_key.items()
            if (*rest, last) == (name, words, queries)
        ]
        if kept or any(len(points) > 1 for points in lines.values()):
            labels = title.format(name, words or "all", queries), f"{measures(runs)}, %"
            panels.append(partial(answers_panel, lines=lines, level=kept[0] if kept else None, styles=styles, labels=labels))
    return panels


def keeps_all(run: dict[str, Any]) -> bool:
    """Return whether the memory of a run has room for its prompts, so that no policy evicts anything."""
    row = result_row(run)
    return isinstance(row["memory_size"], int) and row["memory_size"] >= row.get("prompt_tokens", math.inf)


def policy_style(policy: str, number: int) -> dict[str, Any]:
    """Return colour and marker of a policy's line, the same in every panel."""
    return {"color": GREY, "marker": "o", "ms": 5} if policy == "fifo" else line_style(number)


def answers_panel(
    axis: Any,
    lines: dict[str, dict[int, Share]],
    level: Share | None,
    styles: dict[str, dict[str, Any]],
    labels: tuple[str, str],
) -> None:
    """Draw the results of each policy over M with Wilson's intervals, in the order of their last points.

    ``level`` is the result where nothing is evicted, ``labels`` are the title and the measure. Policies stand beside one
    another, so that intervals can be told apart.
    """
    drawn = sorted((policy for policy in lines if lines[policy]), key=lambda policy: -max(lines[policy].items())[1].share)
    for place, policy in enumerate(drawn):
        cells = sorted(lines[policy].items())
        ends = [share_interval(cell.share, cell.questions) for _, cell in cells]
        errors = [
            (100 * (cell.share - low), 100 * (high - cell.share)) for (_, cell), (low, high) in zip(cells, ends, strict=True)
        ]
        sizes = [size * BESIDE ** (place - (len(drawn) - 1) / 2) for size, _ in cells]
        shares = [100 * cell.share for _, cell in cells]
        axis.errorbar(sizes, shares, np.abs(errors).T, label=policy, lw=1.2, elinewidth=0.8, clip_on=False, **styles[policy])
    if level:
        low, high = share_interval(level.share, level.questions)
        axis.axhspan(100 * low, 100 * high, color="black", alpha=0.08, lw=0)
        axis.axhline(100 * level.share, color="black", lw=1, ls="--", label="everything kept")
    axis.set(xlabel="entries M per layer; lines: 95 %", ylabel=labels[1], ylim=(0, 105))
    axis.set_title(textwrap.fill(labels[0], TITLE_WIDTH), fontsize=9)
    finish_size_axis(axis, sorted({size for points in lines.values() for size in points}))
    axis.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


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
    axis.imshow(shares_in_blue(shares), aspect="auto")
    for (line, column), share in np.ndenumerate(shares):
        if not np.isnan(share):
            axis.text(column, line, f"{share:.0f}", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
    axis.set(xlabel="tokens of the prompt", ylabel="depth of the answer")
    axis.set_title(textwrap.fill(f"{title}: {measures(runs)}, %", TITLE_WIDTH), fontsize=9)


def shares_in_blue(shares: Any) -> Any:
    """Return the image of shares in per cent [h w]: the larger, the less the ground shows through [h w 4]."""
    colour = [int(BLUE[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return np.concatenate([np.broadcast_to(colour, (*shares.shape, 3)), OPACITY * np.nan_to_num(shares)[..., None] / 100], -1)
