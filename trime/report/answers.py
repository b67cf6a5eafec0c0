"""Question-answering runs: tables, curves over the memory's size, results by depth and length.

The tables and pictures are those of Attendre, Tables 2 to 5.
"""

from __future__ import annotations

import json
import math
import textwrap
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from trime.common.metrics import share_interval
from trime.report.canvas import BLUE, GREY, Panel, finish_size_axis, line_style
from trime.report.run_result import AnsweringRun
from trime.report.tables import PROCESSOR_TIME, Table, optional

OPACITY = 0.6  # of a cell of 100 %, so that numbers in it are legible on a light page and on a dark one
TITLE_WIDTH = 55  # characters of a line above a panel
BESIDE = 1.02  # ratio of the places of two policies of the same size


class Share(NamedTuple):
    """The share of questions that were answered, and how many there were."""

    share: float
    questions: int

    @property
    def interval(self) -> tuple[float, float]:  # Wilson's, 95 %
        return share_interval(self.share, self.questions)

    def __str__(self) -> str:
        low, high = (100 * end for end in self.interval)
        return f"{100 * self.share:.2f} [{low:.1f}, {high:.1f}]"


class Key(NamedTuple):
    """The condition of a share of answers: label of the run, words of a context, M and N."""

    label: str
    words: int | None
    size: int
    queries: str


def answers_table(runs: list[AnsweringRun]) -> Table:
    """Return the table of runs, the best first by the measure that counts."""
    header = ["run", "eviction", "M", "prompt tokens", "exact match, % [95 %]", "contained, % [95 %]", "questions"]
    timed = [PROCESSOR_TIME] * any(run.row.processor_ms_per_token is not None for run in runs)
    lines = []
    for run in sorted(runs, key=lambda run: -run.share):
        row = run.row
        shares = [Share(value, row.questions) if value is not None else "" for value in (row.exact_match, row.contained)]
        lines.append(
            [
                *(run.name, row.eviction, str(row.memory_size)),
                f"{row.prompt_tokens:,}" if row.prompt_tokens else "",
                *map(str, shares),
                *(f"{row.questions:,}", str(run.seed), "default" if row.query_size is None else str(row.query_size)),
                f"last {row.max_prompt_tokens:,}" if row.max_prompt_tokens else "",
                *([optional(row.processor_ms_per_token, ",.3f")] if timed else []),
                optional(row.peak_memory_mb, ",.0f"),
            ]
        )
    return Table([*header, "seed", "N", "truncated to", *timed, "peak MB"], lines)


def label_runs(runs: list[AnsweringRun]) -> list[tuple[str, AnsweringRun]]:
    """Label each run with its name and the settings in which runs of that name differ: only equal runs are averaged."""
    settings: list[dict[str, Any]] = []
    for run in runs:  # of model, questions and reading, without those that have columns of their own
        questions = {key: value for key, value in run.questions.items() if key not in ("seed", "words", "_target_")}
        if "_target_" in run.questions:
            questions["questions"] = run.questions["_target_"].rpartition(".")[2]
        settings.append((run.small_model or {"model": run.model}) | questions | run.answering | (run.row.model_extra or {}))
    labelled = []
    for run, own in zip(runs, settings, strict=True):
        others = [other for namesake, other in zip(runs, settings, strict=True) if namesake.name == run.name]
        differing = [key for key, value in own.items() if any(other.get(key) != value for other in others)]
        labelled.append((", ".join([run.name, *(f"{key} {own[key]}" for key in differing)]), run))
    return labelled


def measures(runs: list[AnsweringRun]) -> str:
    """Return the measures by which answers of several runs count, as in ``exact match or contained``."""
    return " or ".join(sorted({run.measure.replace("_", " ") for run in runs}, reverse=True))


def cells_of(labelled: list[tuple[str, AnsweringRun]]) -> dict[str, dict[Key, Share]]:
    """Return the results of labelled runs by policy and condition, averaged over seeds; truncated inputs are left out.

    A question that several runs were asked counts once: intervals are over questions.
    """
    found: dict[str, dict[Key, list[tuple[str, Share]]]] = {}
    for label, run in labelled:
        row = run.row
        if isinstance(row.memory_size, int) and not row.max_prompt_tokens:
            queries = "default" if row.query_size is None else str(row.query_size)
            asked = json.dumps([run.questions, run.questions_text, row.questions], sort_keys=True)
            key = Key(label, run.questions.get("words"), row.memory_size, queries)
            found.setdefault(row.eviction, {}).setdefault(key, []).append((asked, Share(run.share, row.questions)))
    return {
        policy: {
            key: Share(mean(cell.share for _, cell in cells), sum({asked: cell.questions for asked, cell in cells}.values()))
            for key, cells in by_key.items()
        }
        for policy, by_key in found.items()
    }


def keys_of(cells: dict[str, dict[Key, Share]]) -> list[Key]:
    """Return the conditions of all policies, in order of label, N, words and M."""
    keys = {key for by_key in cells.values() for key in by_key}
    return sorted(keys, key=lambda key: (key.label, key.queries, key.words or 0, key.size))


def policies_table(runs: list[AnsweringRun]) -> Table:
    """Return the share of answered questions in per cent: a line for each policy, the worst first."""
    cells = cells_of(label_runs(runs))
    keys = keys_of(cells)
    # Only what differs between columns is in their titles.
    labels, words, _, queries = (len({key[place] for key in keys}) > 1 for place in range(4))
    titles = []
    for key in keys:
        length, waiting = [f"{key.words or 'all'} words"] * words, [f"N {key.queries}"] * queries
        titles.append(", ".join([*[key.label] * labels, *length, f"M {key.size}", *waiting]))
    ranked = sorted(cells, key=lambda policy: mean(cell.share for cell in cells[policy].values()))
    return Table(["eviction", *titles], [[policy, *(str(cells[policy].get(key, "")) for key in keys)] for policy in ranked])


def answers_panels(runs: list[AnsweringRun]) -> list[Panel]:
    """Return a panel of results over M for each model, context length and N, where M varies or a memory kept everything."""
    labelled = label_runs(runs)

    def keeps_all(run: AnsweringRun) -> bool:  # no policy evicts anything where a prompt fits into the memory
        return isinstance(run.row.memory_size, int) and run.row.memory_size >= (run.row.prompt_tokens or math.inf)

    def by_size(cells: dict[Key, Share], condition: Key) -> dict[int, Share]:
        return {key.size: share for key, share in cells.items() if key._replace(size=0) == condition}

    cells, whole = (cells_of([(label, run) for label, run in labelled if keeps_all(run) is kept]) for kept in (False, True))
    styles = {policy: line_style(number) for number, policy in enumerate(sorted(cells.keys() - {"fifo"}))}
    styles |= {"fifo": {"color": GREY, "marker": "o", "ms": 5}}
    panels: list[Panel] = []
    for condition in dict.fromkeys(key._replace(size=0) for key in keys_of(cells)):
        lines = {policy: by_size(by_key, condition) for policy, by_key in cells.items()}
        level = next((share for by_key in whole.values() for share in by_size(by_key, condition).values()), None)
        if level or any(len(points) > 1 for points in lines.values()):
            title = f"{condition.label}, {condition.words or 'all'} words, N {condition.queries}"
            labels = title, f"{measures(runs)}, %"
            panels.append(partial(answers_panel, lines=lines, level=level, styles=styles, labels=labels))
    return panels


def answers_panel(
    axis: Any,
    lines: dict[str, dict[int, Share]],
    level: Share | None,
    styles: dict[str, dict[str, Any]],
    labels: tuple[str, str],
) -> None:
    """Draw each policy over M with Wilson's intervals; ``level``: nothing is evicted; ``labels``: title and measure."""
    drawn = sorted((policy for policy in lines if lines[policy]), key=lambda policy: -max(lines[policy].items())[1].share)
    for place, policy in enumerate(drawn):
        cells = sorted(lines[policy].items())
        errors = [[100 * abs(cell.share - end) for end in cell.interval] for _, cell in cells]
        # Policies are drawn beside one another, so that intervals can be told apart.
        sizes = [size * BESIDE ** (place - (len(drawn) - 1) / 2) for size, _ in cells]
        shares = [100 * cell.share for _, cell in cells]
        axis.errorbar(sizes, shares, np.array(errors).T, label=policy, lw=1.2, elinewidth=0.8, clip_on=False, **styles[policy])
    if level:
        low, high = level.interval
        axis.axhspan(100 * low, 100 * high, color="black", alpha=0.08, lw=0)
        axis.axhline(100 * level.share, color="black", lw=1, ls="--", label="everything kept")
    axis.set(xlabel="entries M per layer; lines: 95 %", ylabel=labels[1], ylim=(0, 105))
    axis.set_title(textwrap.fill(labels[0], TITLE_WIDTH), fontsize=9)
    finish_size_axis(axis, {size for points in lines.values() for size in points})
    axis.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def depth_panels(runs: list[AnsweringRun]) -> list[Panel]:
    """Return a panel of results by depth and length for each label, policy and M that has several lengths."""
    found: dict[tuple[str, str, int], list[AnsweringRun]] = {}
    for label, run in label_runs(runs):
        if run.row.by_depth and isinstance(run.row.memory_size, int):
            found.setdefault((label, run.row.eviction, run.row.memory_size), []).append(run)
    panels: list[Panel] = []
    several = len({label for label, _, _ in found}) > 1
    for (label, policy, size), group in sorted(found.items(), key=lambda item: item[0]):
        if len({run.row.prompt_tokens for run in group}) > 1:
            title = ", ".join([*[label] * several, policy, f"M {size}"])
            panels.append(partial(depth_panel, runs=group, title=title))
    return panels


def depth_panel(axis: Any, runs: list[AnsweringRun], title: str) -> None:
    """Draw the share of answered questions in per cent by the length of the prompt and the depth of the answer in it."""
    cells: dict[tuple[int, float], list[tuple[float, int]]] = {}
    for run in runs:
        for cell in run.row.by_depth:
            key = run.row.prompt_tokens or 0, cell.depth
            cells.setdefault(key, []).append((getattr(cell, run.measure), cell.questions))
    lengths, depths = (sorted({key[place] for key in cells}) for place in (0, 1))
    shares = np.full((len(depths), len(lengths)), np.nan)
    for (length, depth), of_runs in cells.items():
        # Seeds may have asked different numbers of questions at a depth.
        share = sum(share * count for share, count in of_runs) / sum(count for _, count in of_runs)
        shares[depths.index(depth), lengths.index(length)] = 100 * share
    # The smaller a share, the more transparent: so a cell suits a light page and a dark one.
    blue = [int(BLUE[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    opacity = OPACITY * np.nan_to_num(shares)[..., None] / 100
    axis.imshow(np.concatenate([np.broadcast_to(blue, (*shares.shape, 3)), opacity], -1), aspect="auto")
    for (line, column), share in np.ndenumerate(shares):
        if not np.isnan(share):
            axis.text(column, line, f"{share:.0f}", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
    axis.set(xlabel="tokens of the prompt", ylabel="depth of the answer")
    axis.set_title(textwrap.fill(f"{title}: {measures(runs)}, %", TITLE_WIDTH), fontsize=9)
