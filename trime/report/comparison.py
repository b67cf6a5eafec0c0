"""Compare the runs of one text: groups of seeds, their differences to a baseline, and the results of the papers."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig

from trime.common.io import plain
from trime.report import tables
from trime.report.bootstrap import bleu_difference, difference, interval_of, measured_difference
from trime.report.canvas import BLUE, GREY, Panel, canvas, draw_dots, finish_size_axis, line_style, save_picture
from trime.report.figures import Figure, sizes_panel
from trime.report.groups import Group, baseline_of, comparable, group_labels, group_runs, metric_names, rank_groups, size_text
from trime.report.page import Section, picture_sections
from trime.report.run_result import ScoredRun
from trime.report.tables import INTERVAL, Table
from trime.report.terminal import runs_lines, runs_verdict

# By the title of a set of published results and the experiment's name: dev and test, or only test.
PublishedResults = dict[str, dict[str, list[float]]]
PUBLISHED_NOTE = (
    "Columns with * hold results published for the papers' texts and larger budgets, dev / test or test alone: compare their "
    "order."
)
VERDICTS = {
    "agrees": "agree with them in sign",
    "disagrees": "disagree",
    "no difference shown": "show no difference",
    "no interval": "have no interval",
    "too few units": "have too few units for a verdict",
}


class Comparison(NamedTuple):
    """The runs of one text: groups of seeds, their table, and the order of pairs beside that of published results."""

    runs: list[ScoredRun]
    groups: list[Group]
    table: Table
    order: Table
    against: str
    verdict: str  # whether a memory helps, or which run is best

    @property
    def title(self) -> str:
        return self.runs[0].title

    @property
    def lines(self) -> str:
        """Return the table as it is printed."""
        return runs_lines(self.table, metric_names(self.runs), self.against)

    @property
    def shown(self) -> Table:
        """Return the columns that fit a page: results, memories, and the policy where several are compared."""
        titles = ["run", INTERVAL.format(self.against), "memories"]
        if len({group.row.eviction for group in self.groups} - {None}) > 1:
            titles += ["eviction", "M"]
        return self.table.columns(
            number
            for number, title in enumerate(self.table.header)
            if title in titles or (title.startswith(("test ", "dev ", "BLEU")) and title != "test bits/byte")
        )

    @property
    def footnotes(self) -> list[str]:
        """Explain the table's columns and marks."""
        units, header = " or ".join(sorted({units_of(group) for group in self.groups})), self.table.header
        paired = f"Differences to {self.against} are paired, with a 95 % interval by bootstrap over seeds and {units}."
        notes = {
            paired: INTERVAL.format(self.against) in header,
            PUBLISHED_NOTE: any(title.endswith("*") for title in header),
            tables.FITTED_NOTE: any(run.is_fitted for run in self.runs),
            tables.EDGE_NOTE: any(tables.EDGE in title for title in header),
        }
        return [note for note, applies in notes.items() if applies]

    @property
    def notes(self) -> list[str]:
        """Return the notes on the text, the table's columns and marks, and the order of pairs."""
        return [*self.text_notes, *self.footnotes, *filter(None, [self.verdicts])]

    @property
    def text_notes(self) -> list[str]:
        """Return the warnings of all runs, those that are not of all with the names of their runs."""
        names: dict[str, list[str]] = {}
        for run in self.runs:
            for note in tables.text_notes(run):
                names.setdefault(note, []).append(run.name)
        shared = Counter(run.name for run in self.runs)
        return [
            note if Counter(of_note) == shared else f"{', '.join(dict.fromkeys(of_note))}: {note}"
            for note, of_note in names.items()
        ]

    @property
    def verdicts(self) -> str:
        """Return a sentence that counts the verdicts on the order of pairs; nothing if there are no pairs."""
        counts = Counter(line[-1] for line in self.order.lines)
        phrases = ", ".join(f"{counts[name]} {words}" for name, words in VERDICTS.items() if counts[name])
        return f"Of {len(self.order.lines)} pairs that the papers report too, {phrases}." if phrases else ""

    def markdown(self, titled: bool) -> str:
        """Return text, table and notes, under a heading if ``titled``."""
        shown = [f"## {self.title}"] * titled + [
            self.verdict,
            tables.text_facts(self.runs[0]),
            tables.markdown(*self.table).rstrip(),
        ]
        return "\n\n".join([*shown, *self.notes]) + "\n"

    def sections(self, figures: dict[str, Figure]) -> list[Section]:
        facts = f"{tables.text_facts(self.runs[0])}. The best run comes first; all columns are below."
        note = f"{self.verdict}\n{facts}"
        results: Panel = partial(compare_panel, groups=self.groups)
        panels = [results, *policies_panels(self.groups), *curves_panels(self.runs)]
        sections = [Section(self.title, note, [self.shown], footnotes=[*self.text_notes, *self.footnotes])]
        sections += picture_sections(f"Pictures of {self.title}", panels)
        for figure in figures.values():
            sections += picture_sections(figure.title, figure.comparison_panels(self.runs))
        if self.verdicts:
            sections.append(Section("Order of the papers", self.verdicts, [self.order], folded=True))
        return [*sections, Section(f"All columns of {self.title}", "Also in table.csv.", [self.table], folded=True)]


def compare_runs(runs: list[ScoredRun], settings: DictConfig) -> Comparison:
    """Compare runs of one text; ``settings`` is the section ``report``."""
    groups, own_text = group_runs(runs), runs[0].evaluated.own
    hidden = settings.show_published == "never" or (settings.show_published == "auto" and own_text)
    published = {} if hidden else plain(settings.published) or {}
    table = compare_table(groups, settings.against, published)
    return Comparison(runs, groups, table, order_table(groups, published), settings.against, runs_verdict(groups))


def joined_table(comparisons: list[Comparison]) -> Table:
    """Return one table of several texts, with the union of their columns after one that names the text."""
    columns = list(dict.fromkeys(title for comparison in comparisons for title in comparison.table.header))
    lines = []
    for comparison in comparisons:
        for line in comparison.table.lines:
            cells = dict(zip(comparison.table.header, line, strict=True))
            lines.append([comparison.title, *(cells.get(title, "") for title in columns)])
    return Table(["text", *columns], lines)


def units_of(group: Group) -> str:
    """Return the number and the kind of units that a bootstrap resamples, as in ``12 documents``."""
    count, unit, scored = len(group.row.documents), group.row.bootstrap_unit, group.first.scored.get("test")
    if scored and unit.startswith("parts"):
        unit += f" of {scored.documents} document{'s' * (scored.documents > 1)}"
    return f"{count} {unit}" if count != 1 else f"1 {unit.replace('documents', 'document').replace('parts', 'part')}"


def compare_table(groups: list[Group], baseline: str, published: PublishedResults) -> Table:
    """Return a table of runs on one text: each group's last row, its difference to the baseline, published results."""
    groups = rank_groups(groups)[1]
    metric = metric_names([group.first for group in groups])
    lines = [
        {"run": label} | group_columns(group, baseline_of(group, groups, baseline), baseline, metric)
        for label, group in zip(group_labels(groups), groups, strict=True)
    ]
    # The papers have other texts and budgets, so these columns are marked.
    for title, rows in published.items():
        for line, group in zip(lines, groups, strict=True):
            line[f"{title}*"] = " / ".join(f"{x:.2f}" for x in rows.get(group.name, []))
    # Columns without any cell are left out.
    return tables.table_of(lines, {title for title in lines[0] if not any(line[title] for line in lines)})


def group_columns(group: Group, other: Group | None, baseline: str, metric: str) -> dict[str, str]:
    """Return the cells of a group's line by title: its results, their text and their cost."""
    run, row, size = group.first, group.row, group.first.parameters or 0
    sizes = sorted({run.row.memory_size for run in group.runs if run.row.memory_size is not None}, key=np.mean)
    recall = group.average(lambda run: run.datastore.recall if run.datastore else None) if row.search else None
    translates = row.bleu is not None
    edges = dict.fromkeys(tables.SYMBOLS.get(name, name) for dev in group.dev for name in dev.at_grid_edge)
    return {
        "test BLEU": tables.optional(group.average(lambda run: run.row.bleu), ".2f"),
        f"BLEU vs {baseline}": str((other and translates and bleu_difference(group, other)) or ""),
        f"test {metric}": tables.decimals(group.mean("test")),
        INTERVAL.format(baseline): str(difference(group, other)) if other else "",
        "dev BLEU": tables.optional(group.average(lambda run: run.dev.bleu), ".2f"),
        f"dev {metric}": tables.decimals(group.mean("valid")),
        # Where tokens are bytes, this is the column of the metric.
        "test bits/byte": tables.optional(group.average(lambda run: run.row.bits_per_byte), ".3f"),
        "seeds": group.seeds,
        "trained on": run.dataset.name if run.is_trained else "not trained",
        "memories": tables.row_name(row.memories),
        "M": " or ".join(map(size_text, sizes)),
        "eviction": row.eviction or "",
        "params": (f"{size / 1e6:.1f}M" if size >= 1e6 else f"{size / 1e3:.1f}k") if size else "",
        "search": row.search or "",
        "recall": tables.optional(recall, ".2f"),
        f"train {tables.PROCESSOR_TIME}": tables.optional(group.average(lambda run: run.train.processor_ms_per_token), ",.3f"),
        tables.PROCESSOR_TIME: tables.optional(group.average(lambda run: run.row.processor_ms_per_token), ",.3f"),
        "memory MB": tables.optional(group.average(lambda run: run.row.peak_memory_mb), ",.0f"),
        f"tuned to an edge {tables.EDGE}": ", ".join(edges),
    }


def order_table(groups: list[Group], published: PublishedResults) -> Table:
    """Return a table that compares the order of every two published rows on test with the order here.

    Translations are compared by BLEU. The verdict is *agrees* or *disagrees* where the difference is significant at 95 %,
    otherwise *no difference shown*, *no interval* for a single part and seed, or *too few units*. Experiments that were run
    here with several settings are left out.
    """
    # A name that occurs twice is of several settings: which of them the paper's row has is unknown.
    names = Counter(group.name for group in groups)
    lines = []
    for title, rows in published.items():
        published_groups = [group for group in groups if group.name in rows and names[group.name] == 1]
        for one, other in combinations(sorted(published_groups, key=lambda group: -rows[group.name][-1]), 2):
            if not comparable(one, other):
                continue
            paper, text, verdict = rows[one.name][-1] - rows[other.name][-1], "", "no interval"
            if measured := measured_difference(one, other):
                text = f"{measured.value:+.2f} {measured.interval}"
                if measured.significant:
                    verdict = "agrees" if measured.value * paper > 0 else "disagrees"
                elif measured.has_verdict:
                    verdict = "no difference shown"
                elif not math.isnan(measured.low):
                    verdict = "too few units"
            both = [tables.mark_edge(group.name, group.dev) for group in (one, other)]
            lines.append([title, *both, f"{paper:+.2f}", text, verdict])
    return Table(["published in", "row", "minus row", "paper", "here, 95 % interval", "order"], lines)


def compare_picture(texts: list[list[Group]], path: Path) -> Path:
    """Draw the last row of each group, one axis below the other for each text."""
    heights = [max(2.6, 1.2 + 0.42 * len(groups)) for groups in texts]
    figure, axes = canvas(8, sum(heights), 1, len(texts), heights)
    for axis, groups in zip(axes, texts, strict=True):
        compare_panel(axis, groups)
    return save_picture(figure, path)


def compare_panel(axis: Any, groups: list[Group]) -> None:
    """Draw the last row of each group, the best first, with its 95 % interval and a dot for each seed."""
    metric, groups = rank_groups(groups)
    groups = [group for group in groups if np.isfinite(group.mean("test", metric))] or groups
    colours = []
    for run in (group.first for group in groups):
        by_name = run.name.startswith("trime")  # earlier versions recorded only the name
        colours.append(BLUE if (by_name if run.trained_with_memory is None else run.trained_with_memory) else GREY)
    names = [tables.mark_edge(label, group.dev) for label, group in zip(group_labels(groups), groups, strict=True)]
    intervals = [interval_of(group) for group in groups]
    draw_dots(axis, names, [group.values("test", metric) for group in groups], intervals, metric, colours)
    axis.set_title(groups[0].first.title)
    if {BLUE, GREY} <= {*colours}:
        for colour, label in ((BLUE, "trained by TRIME"), (GREY, "others")):
            axis.plot([], [], "o", ms=7, color=colour, label=label)
        # Room for the legend, below the last row.
        axis.set_ylim(len(groups) + 1.2, -0.7)
        axis.legend(frameon=False, fontsize=9, loc="lower left" if metric == "BLEU" else "lower right")


def policies_panels(groups: list[Group]) -> list[Panel]:
    """Return a panel of test results over the size of the memory, if there are several eviction policies.

    It has a line for each experiment and policy, averaged over seeds (Attendre section 3.1). Layers with memories of different
    sizes are placed at the mean size.
    """

    def draw(axis: Any) -> None:
        lines: dict[str, dict[float, float]] = {}
        for group in groups:
            size = group.row.memory_size
            if group.row.eviction and size is not None:
                lines.setdefault(f"{group.name}, {group.row.eviction}", {})[float(np.mean(size))] = group.mean("test")
            elif size == 0:
                axis.axhline(group.mean("test"), color="black", lw=1, ls=":", label=f"{group.name}, no memory")
        for number, (label, points) in enumerate(sorted(lines.items())):
            axis.plot(*zip(*sorted(points.items()), strict=True), label=label, **line_style(number))
        title, metric = f"eviction policies on {groups[0].first.title}", metric_names([group.first for group in groups])
        axis.set(xlabel="entries in memory", ylabel=f"test {metric}", title=title)
        finish_size_axis(axis, {size for points in lines.values() for size in points})

    return [draw] if len({group.row.eviction for group in groups} - {None}) > 1 else []


def curves_panels(runs: list[ScoredRun]) -> list[Panel]:
    """Return a panel for each metric, for the runs that were analysed over the size of the long memory (TRIME Figure 3)."""
    by_metric: dict[str, dict[str, dict[str, float]]] = {}
    for run in runs:
        if "valid" in run.analysis and (curve := run.analysis["valid"].by_memory_size):
            by_metric.setdefault(run.row.metric_name, {})[f"{run.name}, seed {run.seed}"] = curve
    draw = partial(sizes_panel, title=f"size of long memory on {runs[0].title}")
    panels = sorted(by_metric.items(), reverse=True)
    return [partial(draw, curves=curves, metric=metric, label=f"dev {metric}") for metric, curves in panels]
