"""The last lines of a run or a sweep: a table that fits a terminal, and its verdict in a sentence."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Collection, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from trime.common.metrics import share_interval
from trime.report.answers import answers_table
from trime.report.bootstrap import Difference, measured_difference
from trime.report.groups import Group, comparable, group_labels, rank_groups, size_text
from trime.report.run_result import FEWEST, VOCABULARY, AnsweringRun, ScoredRun
from trime.report.tables import INTERVAL, PROCESSOR_TIME, Table, decimals, memories_of, row_difference

WIDTH = 100  # characters of a line
COLUMNS = 5  # of a table
PLAIN, AT_TEST, TRAINED = "plain", "with memories at test", "trained for them"  # kinds of runs
MOST_NOTES = 3  # that are printed; a page has all


def fit_columns(table: Table, titles: Collection[str]) -> str:
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
    # Brackets are those of intervals, and nothing is coloured: the same lines go into a file.
    console = Console(file=(out := io.StringIO()), width=WIDTH, markup=False, emoji=False, highlight=False, color_system=None)
    console.print(shown)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def ending(verdict: str, lines: str, notes: Sequence[str], place: str) -> str:
    """Return the last lines that a run or a sweep prints: its verdict, its table, the first notes, and where its files are."""
    wrapped = [textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False) for line in verdict.splitlines()]
    shown = [first_line(note) for note in notes[:MOST_NOTES]]
    if further := len(notes) - len(shown):
        shown.append(f"{further} more note{'s' * (further > 1)} on the page.")
    parts = ["\n".join(wrapped), lines.rstrip(), "\n".join(shown), place]
    return "\n\n".join(["", *filter(None, parts)])


def first_line(note: str) -> str:
    """Return the part of a note that fits a line: whole, or without its explanations and examples."""
    if len(note) <= WIDTH:
        return note
    head = re.split(r"(?<=.{20})(?::|\.|;) | \(for instance", note)[0]
    return textwrap.shorten(head, WIDTH - 2, placeholder=" …").rstrip(".") + "."


def run_lines(run: ScoredRun, table: Table) -> str:
    """Return the rows of a run, whose ``table`` has them in their order, as they are printed: the best first."""
    rows = run.metrics["test"]
    by_bleu = run.row.bleu is not None
    worth = [-(row.bleu or 0) if by_bleu else row.value if math.isfinite(row.value) else math.inf for row in rows]
    lines = [table.lines[number] for number in sorted(range(len(rows)), key=worth.__getitem__)]
    details = ("tokens", "dev tokens", "search", "tuned on dev")  # only the run's files have these
    return fit_columns(Table(table.header, lines), [title for title in table.header if title not in details])


def runs_lines(table: Table, metric: str, against: str) -> str:
    """Return the lines of a comparison with results, differences to ``against``, seeds and costs."""
    results = "test BLEU", f"BLEU vs {against}", f"test {metric}", INTERVAL.format(against)
    return fit_columns(table, ["run", *results, "seeds", PROCESSOR_TIME])


def answers_lines(runs: list[AnsweringRun]) -> str:
    """Return the runs that answered questions, the best first."""
    measures = [f"{measure.replace('_', ' ')}, % [95 %]" for measure in {run.measure for run in runs}]
    return fit_columns(answers_table(runs), ["run", "eviction", "M", *measures, PROCESSOR_TIME])


def run_result(run: ScoredRun) -> str:
    """Return the result of a run's own row in a few words."""
    return f"{run.name}, seed {run.seed}: test {result_of(Group([run]))}"


def run_verdict(run: ScoredRun) -> str:
    """Return a sentence on a run's own row, beside the same model without memories if it was trained without them."""
    row, first, sentence = run.row, run.metrics["test"][0], f"On {run.title}, {run_result(run)}"
    if row is first or first.memories != VOCABULARY:
        return f"{sentence}."
    if row.bleu is not None:
        return f"{sentence}, {decimals(first.bleu or 0.0)} without memories."
    if run.trained_with_memory:  # without them it is no baseline: a model trained plainly does better
        return f"{sentence}. -m experiment=vanilla,knn_lm_cache,{run.name} says what memories gain over a plain model."
    return f"{sentence}{difference_text(row_difference(row, first), 'the model without memories')}."


def runs_verdict(groups: list[Group]) -> str:
    """Return whether a memory helps, if a plain model is among the runs of a text; else the best run beside the next one."""
    return memory_verdict(groups) or best_verdict(groups)


def memory_verdict(groups: list[Group]) -> str:
    """Return the results of a plain model, of memories at test, and of training for the same memories; nothing without them.

    Each is the best on dev of its kind, and is compared with the one before.
    """
    ranked = rank_groups(groups, "valid")[1]
    plain = next((group for group in ranked if kind_of(group) == PLAIN), None)
    rivals = [group for group in ranked if plain and comparable(plain, group)]
    trained = next((group for group in rivals if kind_of(group) == TRAINED), None)
    memories = memories_of(trained.row.memories) if trained else None
    at_test = [group for group in rivals if kind_of(group) == AT_TEST and memories in (None, memories_of(group.row.memories))]
    others = [(AT_TEST, group) for group in at_test[:1]]
    others += [(TRAINED if at_test else "trained for memory", group) for group in (trained,) if group]
    if plain is None or not others:
        return ""
    chosen, metric = [plain, *(group for _, group in others)], result_metric(plain)
    texts = [f"{PLAIN} {decimals(plain.mean('test', metric))}"]
    for (kind, group), before in zip(others, chosen, strict=False):
        measured = measured_difference(group, before)
        # The line fits a terminal: where a memory helps at test, the table has the interval.
        shown = measured is not None and not math.isnan(measured.value) and (group is chosen[-1] or not measured.significant)
        texts.append(f"{kind} {decimals(group.mean('test', metric))}" + f" ({measured})" * shown)
    labels = dict(zip(map(id, groups), group_labels(groups), strict=True))
    names, seeds = "; ".join(labels[id(group)] for group in chosen), f", {len(plain.runs)} seeds" * (len(plain.runs) > 1)
    about = f"Test {metric} on {plain.first.title}{seeds}: {names}. In brackets: less the value before, 95 %."
    return f"{' · '.join(texts)}\n{about}"


def kind_of(group: Group) -> str | None:
    """Return whether a model is plain, has memories only at test, or was trained for them; None if it now lacks them."""
    if group.row.memories == VOCABULARY:
        return None if group.first.trained_with_memory else PLAIN
    return TRAINED if group.first.trained_with_memory else AT_TEST


def best_verdict(groups: list[Group]) -> str:
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
    """Describe a run's reading and its answers, as in ``fifo, M 512: 55.00 % [40.1, 69.0]``."""
    size = "" if run.row.memory_size is None else f", M {size_text(run.row.memory_size)}"
    low, high = (100 * end for end in share_interval(run.share, run.row.questions))
    return f"{run.name}, {run.row.eviction}{size}: {100 * run.share:.1f} % [{low:.1f}, {high:.1f}]"


def result_metric(group: Group) -> str:
    """Return the measure of a group: BLEU if it translates, else perplexity or bits."""
    return "BLEU" if group.row.bleu is not None else group.row.metric_name


def result_of(group: Group) -> str:
    """Return the measure of a group and its result on test, as in ``perplexity 12.99``."""
    metric = result_metric(group)
    return f"{metric} {decimals(group.mean('test', metric))}"


def difference_text(measured: Difference | None, other: str) -> str:
    """Return the end of a sentence that says how a result differs from that of ``other``, and how sure that is."""
    if measured is None or math.isnan(measured.value):
        return ""
    text = f"{measured.value:+.2f} {measured.interval}"
    if not measured.has_verdict:
        return f" ({text} against {other}: {measured.units} parts are too few for a verdict, which needs {FEWEST})"
    return f", {text} against {other}" if measured.significant else f"; no difference from {other} is shown ({text})"
