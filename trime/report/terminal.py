"""What a run or a sweep prints at its end: a table that fits a terminal, and its verdict in a sentence."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Collection, Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from trime.common.metrics import share_interval
from trime.report.answers import answers_table
from trime.report.bootstrap import Difference, measured_difference
from trime.report.groups import Group, comparable, group_labels, rank_groups, size_text
from trime.report.run_result import FEWEST, VOCABULARY, AnsweringRun, ScoredRun
from trime.report.tables import INTERVAL, PROCESSOR_TIME, Table, decimals, row_difference

WIDTH = 100  # characters of a line
COLUMNS = 5  # of a table


def fitted(table: Table, titles: Collection[str]) -> str:
    """Return the first five columns of a table that are among ``titles``, as lines of at most 100 characters.

    Cells that are too long wrap: nothing is cut off.
    """
    numbers = [number for number, title in enumerate(table.header) if title in titles][:COLUMNS]
    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number in numbers:
        shown.add_column(table.header[number], justify="right" if table.numeric[number] else "left", overflow="fold")
    for line in table.lines:
        cells = [line[number] for number in numbers]
        # An interval says what files add in words: that no difference is shown.
        shown.add_row(*(cell.removesuffix(" no difference shown") for cell in cells))
    # Brackets are those of intervals, and nothing is coloured: the same lines stand in a file.
    console = Console(file=(out := io.StringIO()), width=WIDTH, markup=False, emoji=False, highlight=False, color_system=None)
    console.print(shown)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def ending(lines: str, verdict: str, notes: Iterable[str], place: str) -> str:
    """Return what a run or a sweep prints at its end: its table, its verdict, notes, and where its files are."""
    wrapped = (textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) for text in (verdict, *notes))
    return "\n\n".join(["", lines.rstrip(), *wrapped, place])


def run_lines(run: ScoredRun, table: Table) -> str:
    """Return the rows of a run, whose ``table`` has them in their order, as they are printed: the best first."""
    rows = run.metrics["test"]
    by_bleu = run.row.bleu is not None
    worth = [-(row.bleu or 0) if by_bleu else row.value if math.isfinite(row.value) else math.inf for row in rows]
    lines = [table.lines[number] for number in sorted(range(len(rows)), key=worth.__getitem__)]
    details = ("tokens", "dev tokens", "search", "tuned on dev")  # these stand in the run's files alone
    return fitted(Table(table.header, lines), [title for title in table.header if title not in details])


def runs_lines(table: Table, metric: str, against: str) -> str:
    """Return the lines of a comparison with results, differences to ``against``, seeds and costs."""
    results = "test BLEU", f"BLEU vs {against}", f"test {metric}", INTERVAL.format(against)
    return fitted(table, ["run", *results, "seeds", PROCESSOR_TIME])


def answers_lines(runs: list[AnsweringRun]) -> str:
    """Return the runs that answered questions, the best first."""
    measures = [f"{measure.replace('_', ' ')}, % [95 %]" for measure in {run.measure for run in runs}]
    return fitted(answers_table(runs), ["run", "eviction", "M", *measures, PROCESSOR_TIME])


def run_result(run: ScoredRun) -> str:
    """Return the result of a run's own row in a few words."""
    return f"{run.name}, seed {run.seed}: test {result_of(Group([run]))}"


def run_verdict(run: ScoredRun) -> str:
    """Return a sentence on a run's own row, beside the same model without its memories."""
    row, first, sentence = run.row, run.metrics["test"][0], f"On {run.title}, {run_result(run)}"
    if row is first or first.memories != VOCABULARY:
        return f"{sentence}."
    if row.bleu is not None:
        return f"{sentence}, {decimals(first.bleu or 0.0)} without memories."
    return f"{sentence}{difference_text(row_difference(row, first), 'the model without memories')}."


def runs_verdict(groups: list[Group]) -> str:
    """Return a sentence on the best run of a text, beside the next one."""
    groups = rank_groups(groups)[1]
    labels, best = group_labels(groups), groups[0]
    seeds = f" over {len(best.runs)} seeds" * (len(best.runs) > 1)
    sentence = f"On {best.first.title}, {labels[0]} has{' the best' * (len(groups) > 1)} test {result_of(best)}{seeds}"
    others = [number for number, group in enumerate(groups) if number and comparable(best, group)]
    if not others:
        return f"{sentence}{'; no other run has its training, its documents and its seeds' * (len(groups) > 1)}."
    return f"{sentence}{difference_text(measured_difference(best, groups[others[0]]), labels[others[0]])}."


def answers_verdict(runs: list[AnsweringRun]) -> str:
    """Return a sentence on the run that answered most questions, beside the next one."""
    best, *others = sorted(runs, key=lambda run: -run.share)
    sentence = f"{answers_text(best)} of {best.row.questions:,} questions"
    return f"{sentence}; next is {answers_text(others[0])}." if others else f"{sentence}."


def answers_text(run: AnsweringRun) -> str:
    """Return how a run read and what it answered, as in ``fifo, M 512: 55.00 % [40.1, 69.0]``."""
    size = "" if run.row.memory_size is None else f", M {size_text(run.row.memory_size)}"
    low, high = (100 * end for end in share_interval(run.share, run.row.questions))
    return f"{run.name}, {run.row.eviction}{size}: {100 * run.share:.1f} % [{low:.1f}, {high:.1f}]"


def result_of(group: Group) -> str:
    """Return what a group is judged by, and its result on test, as in ``perplexity 12.99``."""
    metric = "BLEU" if group.row.bleu is not None else group.row.metric_name
    return f"{metric} {decimals(group.mean('test', metric))}"


def difference_text(measured: Difference | None, other: str) -> str:
    """Return the end of a sentence that says how a result differs from that of ``other``, and how sure that is."""
    if measured is None or math.isnan(measured.value):
        return ""
    text = f"{measured.value:+.2f} {measured.interval}"
    if not measured.has_verdict:
        return f" ({text} against {other}: {measured.units} parts are too few for a verdict, which needs {FEWEST})"
    return f", {text} against {other}" if measured.significant else f"; no difference from {other} is shown ({text})"
