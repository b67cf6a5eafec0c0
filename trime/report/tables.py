"""Tables of one run as Markdown and CSV, how their values are formatted, and notes on the text that was scored."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable
from statistics import mean
from typing import NamedTuple

import numpy as np

from trime.common.metrics import MEASURES
from trime.report.bootstrap import Difference, paired_bootstrap
from trime.report.run_result import FEW_TOKENS, FEWEST, VOCABULARY, Row, ScoredRun, Subsets

TableRows = list[list[str]]
NUMBER = re.compile(r"[-+]?[\d,.]+( / [\d.]+)?")
INTERVAL_CELL = re.compile(r"([-+]?[\d.]+) (?:\[([-+]?[\d.]+), ([-+]?[\d.]+)\]|one part)")
PAIR_CELL = re.compile(r"(?:([\d.]+) / )?([\d.]+)$")  # published results: dev / test, or only test
THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
PROCESSOR_TIME = "processor ms/token"  # elapsed time would count what else the machine was doing
INTERVAL = "vs {}, 95 % interval"  # the column of differences to a baseline
EDGE = "‡"  # marks a row with a tuned setting at the edge of its grid
EDGE_NOTE = (
    f"{EDGE} The best setting lies at the edge of its grid. A wider one may hold a better: for λ 0.02, for instance, "
    "tune.interpolation_share='[0.005,0.01,0.02,0.05]'."
)
FITTED_NOTE = (
    "Rows with a fitted mixture (adaptive, calibrated) are not in the papers. The mixture is fitted on dev, so their dev "
    "result is cross-validated (each document, or block of the text if there are few, is scored by a fit that did not see it)."
)
MIXTURES_NOTE = (
    "+ puts memories into one softmax with the vocabulary (Eq. 6). ⊕ mixes in a softmax over memories by a share λ (Eq. 8): "
    "over all of them where the paper prints it (Eq. 9), over the datastore alone in the released code."
)
FEW_DOCUMENTS = (
    "Test has few documents, so that intervals are over parts of them: they do not say how results vary between documents."
)
MANY_UNKNOWN = 0.02  # share of unknown tokens above which perplexity and bits per byte are much too low
UNKNOWN_NOTE = (
    "{:.1f} % of test is <unk>, which is easy to predict: perplexity and bits per byte are lower than those of a model that "
    "reads every word, such as one of byte pairs (dataset=folder)."
)
SYMBOLS = {  # the papers' symbols of tuned settings
    "temperature": "τ",
    "interpolation_temperature": "τ'",
    "lambda": "λ",
    "cache_temperature": "τ' cache",
    "cache_lambda": "λ cache",
    "memory_size": "M",
    "k": "K",
}
MEMORIES_NOTE = (
    "Without a memory, the mixture is fitted again on dev with the others. Time is that of the memory alone; MB are its peak "
    "size, and for a datastore its size on disk, including the index."
)


class Table(NamedTuple):
    """A table of text cells."""

    header: list[str]
    lines: TableRows

    @property
    def numeric(self) -> list[bool]:
        """Return for each column but the first whether its filled cells are numbers, which are aligned to the right."""
        columns = [[line[number] for line in self.lines if line[number]] for number in range(len(self.header))]
        return [number > 0 and bool(cells) and all(map(NUMBER.fullmatch, cells)) for number, cells in enumerate(columns)]

    def columns(self, numbers: Iterable[int]) -> Table:
        """Return a table of some of the columns, by their numbers."""
        kept = [*numbers]
        header, *lines = [[line[number] for number in kept] for line in [self.header, *self.lines]]
        return Table(header, lines)


def markdown(header: list[str], lines: TableRows) -> str:
    """Return a Markdown table with aligned columns, those of numbers to the right."""
    header, *lines = [[cell.replace("|", "\\|") for cell in line] for line in [header, *lines]]
    widths = [max(2, *(len(line[i]) for line in [header, *lines])) for i in range(len(header))]
    right = Table(header, lines).numeric
    rule = ["-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)]
    rows = [
        [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)]
        for line in [header, rule, *lines]
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def to_csv(header: list[str], lines: TableRows) -> str:
    """Return a table as CSV, with plain numbers: no separators of thousands.

    A result with its interval becomes three columns, published dev and test results become two.
    """
    columns: list[tuple[str, list[str]]] = []
    for number, title in enumerate(header):
        cells = [line[number] for line in lines]
        for pattern, names in ((INTERVAL_CELL, ("", ", low", ", high")), (PAIR_CELL, (", dev", ", test"))):
            found = [pattern.match(cell) for cell in cells]
            if any(match and match[1] for match in found):
                parts = enumerate(names, 1)
                columns += [(title + name, [(match[i] or "") if match else "" for match in found]) for i, name in parts]
                break
        else:
            columns.append((title, [cell.replace(",", "") if THOUSANDS.fullmatch(cell) else cell for cell in cells]))
    out = io.StringIO()
    csv.writer(out).writerow([title for title, _ in columns])
    csv.writer(out).writerows(zip(*(cells for _, cells in columns), strict=True))
    return out.getvalue()


def decimals(value: float) -> str:
    """Return a result with two decimals, as tables print it; results of earlier versions may hold NaN."""
    return f"{value:.2f}" if math.isfinite(value) else "not finite"


def text_facts(run: ScoredRun) -> str:
    """Return a line on the evaluated text: its name, scored tokens of test, share of ``<unk>``, path."""
    data, scored = run.evaluated, run.row.tokens
    in_test, unknown = data.tokens.get("test"), data.unknown.get("test")
    facts = [
        f"{scored:,} tokens" + (f" of {in_test:,}" if in_test and in_test != scored else "") + " of test scored",
        *([f"{100 * unknown:.1f} % <unk>"] if unknown is not None else []),
        *([f"in {data.path}"] if data.path else []),
    ]
    return f"{run.title}: {', '.join(facts)}"


def text_notes(run: ScoredRun) -> list[str]:
    """Return warnings about the evaluated text: few tokens, few documents, many unknown tokens, duplicates."""
    scored, unknown = run.row.tokens, run.evaluated.unknown.get("test", 0.0)
    broken = dict.fromkeys(row.memories for rows in run.metrics.values() for row in rows if math.isnan(row.loss))
    few = f"These are only {scored:,} tokens: judge results by their intervals, which are wide."
    units, unit = len(run.row.documents), run.row.bootstrap_unit.partition(" of ")[0]
    warnings = {
        f"These are {scored:,} tokens: a smoke test, not a result.": run.is_smoke_test,
        f"Too few for a verdict: {units} {unit} of test were scored, and it needs {FEWEST}: raise evaluate.tokens, or add "
        "documents to test.": units < FEWEST,
        few: scored < FEW_TOKENS and not run.is_smoke_test,
        f"Results of {', '.join(broken)} are not finite (NaN): nothing can be compared with them.": bool(broken),
        FEW_DOCUMENTS: run.row.bootstrap_unit.startswith("parts"),
        UNKNOWN_NOTE.format(100 * unknown): unknown > MANY_UNKNOWN,
    }
    return [*(note for note, applies in warnings.items() if applies), *run.duplicates]


def row_name(label: str) -> str:
    """Return a row's name in tables, given its label: without the vocabulary, and with the equation of its mixture."""
    kind, _, fitted = label.partition(": ")
    if fitted:
        return f"{kind}: {fitted.removeprefix(f'{VOCABULARY}, ')}"
    joint, *pools = label.split(" ⊕ ")
    joined = joint.split(" + ")[1:]
    pooled = [pool.strip("()").split(" + ") for pool in pools]
    if not joined:
        return " ".join(f"⊕ {pool if '+' in pool else pool.strip('()')}" for pool in pools) or "no memory"
    name, shared = " + ".join(joined), [set(pool) & set(joined) for pool in pooled]
    if not pools:
        return f"{name} (Eq. 6)"
    if pooled == [joined]:
        return f"{name} ⊕ all (Eq. 9)"
    return f"{name} ⊕ {' ⊕ '.join(pool.strip('()') for pool in pools)}" + " (Eq. 9, released)" * any(shared)


def memories_of(label: str) -> frozenset[str]:
    """Return the memories that the label of a row names."""
    kind, _, fitted = label.partition(": ")
    return frozenset(re.findall(r"[^\s+⊕(),]+", fitted or kind)) - {VOCABULARY}


def one_value(values: Iterable[str]) -> str:
    """Return the value that all have; nothing where they differ."""
    found = {*values}
    return found.pop() if len(found) == 1 else ""


def mark_edge(name: str, rows: Iterable[Row]) -> str:
    """Return a name, marked if one of its dev rows was tuned to the edge of a grid."""
    return f"{name} {EDGE}" if any(row.at_grid_edge for row in rows) else name


def run_table(run: ScoredRun) -> Table:
    """Return a run's table: each row on test and dev, with dev's tokens where rows have other ones (by mixture.tokens).

    Rows are compared with the first one if that is a plain model.
    """
    columns: list[dict[str, str]] = []
    first = run.metrics["test"][0]
    against = INTERVAL.format(row_name(first.memories))
    for dev, test in zip(run.metrics["valid"], run.metrics["test"], strict=True):
        edges = {name: EDGE * (name in dev.at_grid_edge) for name in test.tuned}
        tuned = [f"{SYMBOLS.get(name, name)} {value:g}{edges[name]}" for name, value in test.tuned.items()]
        columns.append(
            {
                "memories": row_name(test.memories),
                "test BLEU": optional(test.bleu, ".2f"),
                "dev BLEU": optional(dev.bleu, ".2f"),
                f"test {test.metric_name}": decimals(test.value),
                against: "" if test is first or test.bleu is not None else str(row_difference(test, first)),
                f"dev {dev.metric_name}": decimals(dev.value),
                "tokens": f"{test.tokens:,}",
                "dev tokens": f"{dev.tokens:,}",
                "search": test.search or "",
                PROCESSOR_TIME: optional(test.processor_ms_per_token, ",.3f"),
                "tuned on dev": ", ".join(tuned),
            }
        )
    # Language models have no BLEU, and results of earlier versions no processor time.
    hidden = {title for title in ("test BLEU", "dev BLEU", against, PROCESSOR_TIME) if not any(line[title] for line in columns)}
    hidden |= {"dev tokens"} if one_value(line["dev tokens"] for line in columns) else set()
    # A model that was trained for memory is no baseline without it.
    hidden |= {against} if run.trained_with_memory else set()
    return table_of(columns, hidden)


def without_common(table: Table) -> Table:
    """Return a table without its columns of tokens and search where all rows that have one have the same."""
    return table.columns(
        number
        for number, title in enumerate(table.header)
        if title not in ("tokens", "search") or len({line[number] for line in table.lines} - {""}) > 1
    )


def common_facts(run: ScoredRun) -> str:
    """Return the facts that all rows of a run's table share, as words before it."""
    search = one_value(row.search for row in run.metrics["test"] if row.search)
    scored = f"{run.row.tokens:,} tokens of test were scored once"
    return f"{scored}{f', by {search} search' * bool(search)}; temperatures, weights and sizes were tuned on dev."


def row_difference(row: Row, other: Row) -> Difference:
    """Return the difference of two rows of one run, by paired bootstrap over the documents of test."""
    return paired_bootstrap(np.array([[row.documents, other.documents]]), row.metric_name)


def table_of(lines: list[dict[str, str]], hidden: Iterable[str] = ()) -> Table:
    """Return a table of lines with their cells by title, without some columns."""
    header = [title for title in lines[0] if title not in hidden]
    return Table(header, [[line[title] for title in header] for line in lines])


def optional(value: float | None, specification: str) -> str:
    return "" if value is None else format(value, specification)


def format_loss(loss: float | None, metric: str) -> str:
    """Return a loss converted to a metric, with two decimals; an empty cell for None."""
    return "" if loss is None else decimals(MEASURES[metric](loss))


def analysis_text(run: ScoredRun) -> str:
    """Return the tables of an analysis, by split.

    They are loss by frequency on dev (TRIME Table 14), retrieval accuracy (Table 13) and loss by size of the long memory
    (Figure 3).
    """
    metric, tables = run.row.metric_name, []
    for split, analysis in run.analysis.items():
        first = next(iter(analysis.buckets.values()))
        lines = [[label, *(format_loss(cell.loss, metric) for cell in cells)] for label, cells in analysis.buckets.items()]
        lines.append(["tokens", *(f"{cell.tokens:,}" for cell in first)])
        header = [f"{metric} by frequency on dev", *(cell.bucket for cell in first)]
        tables.append(f"On {split}:\n\n{markdown(header, lines)}")
        if retrieval := analysis.retrieval:
            shares = [f"{100 * share:.2f}" for share in retrieval.values()]
            tables.append(markdown(["retrieval accuracy, %", *(f"top {k}" for k in retrieval)], [["datastore", *shares]]))
        if curve := analysis.by_memory_size:
            losses = [format_loss(loss, metric) for loss in curve.values()]
            tables.append(markdown(["contexts in long memory", *curve], [[metric, *losses]]))
    return "\n".join(tables)


def memories_table(run: ScoredRun, subsets: Subsets) -> tuple[str, Table]:
    """Return title and table of the memories of a fitted mixture: a line for the vocabulary and one for each memory."""
    metric, weights = run.row.metric_name, subsets.weights
    header = ["memory", f"test {metric} without it", "change with it, 95 % interval", "MB", "µs/token", "largest weight, %"]
    encoding, largest = 1e6 * subsets.encode_seconds_per_token, {name: 100 * each.largest for name, each in weights.items()}
    lines = [["vocabulary (the model)", "", "", "", f"{encoding:,.0f}", f"{largest[VOCABULARY]:.1f}"]]
    for name, cost in subsets.costs.items():
        without, added = memory_contribution([run], name)
        costs = [f"{cost.bytes / 1e6:,.1f}", f"{1e6 * cost.seconds_per_token:,.1f}"]
        lines.append([name, decimals(without), str(added), *costs, f"{largest[name]:.1f}"])
    result = format_loss(subsets.subsets[-1].loss, metric)
    return f"Contribution of each memory ({subsets.mixture} mixture of all: test {metric} {result})", Table(header, lines)


def memory_contribution(runs: list[ScoredRun], memory: str) -> tuple[float, Difference]:
    """Return test perplexity (or bits) without a memory, and the change with it; ``runs`` are one experiment's seeds."""
    metric, losses, sides = runs[0].row.metric_name, [], []
    for subsets in (run.subsets.subsets for run in runs if run.subsets):
        full = subsets[-1]
        if memory not in full.memories:
            raise LookupError(f"{memory} is not among {', '.join(full.memories)}")
        (without,) = (subset for subset in subsets if {*subset.memories} == {*full.memories} - {memory})
        losses.append(without.loss)
        sides.append([full.documents, without.documents])
    return MEASURES[metric](mean(losses)), paired_bootstrap(np.array(sides), metric)
