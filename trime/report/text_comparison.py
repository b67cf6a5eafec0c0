"""Compare the runs of one text: table, notes and sections of a page."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from omegaconf import DictConfig

from trime.io import plain
from trime.report.comparison_table import INTERVAL, compare_table, order_table
from trime.report.figures.base import Figure
from trime.report.figures.comparison import several_panels
from trime.report.groups import Group, document_losses, group_runs, is_fitted
from trime.report.page import Section, Table, picture_sections
from trime.report.tables import EDGE, EDGE_NOTE, FITTED_NOTE, TableRows, applicable, markdown
from trime.report.texts import evaluated_dataset, evaluated_text, text_facts, text_notes

PUBLISHED_NOTE = (
    "Columns with * hold results published for the papers' texts and larger budgets, dev / test or test alone: compare their "
    "order."
)


def units_of(group: Group) -> str:
    """Return how many of what a bootstrap resamples, in words."""
    count, unit = len(document_losses(group.first)), str(group.row.get("bootstrap_unit", "documents"))
    documents = group.first.get("scored", {}).get("test", {}).get("documents")
    if documents and unit.startswith("parts"):
        unit += f" of {documents} document{'s' * (documents > 1)}"
    return f"{count} {unit}" if count != 1 else f"1 {unit.replace('documents', 'document').replace('parts', 'part')}"


class Comparison(NamedTuple):
    """The runs of one text: groups of seeds, their table, and the order of pairs beside that of published results."""

    runs: list[dict[str, Any]]
    groups: list[Group]
    header: list[str]
    lines: TableRows
    order: tuple[list[str], TableRows]
    against: str

    @property
    def title(self) -> str:
        """Return the title of the text, which tells it from others."""
        return evaluated_text(self.runs[0]).title

    @property
    def footnotes(self) -> list[str]:
        """Return how the table's columns and marks are to be read."""
        units = " or ".join(sorted({units_of(group) for group in self.groups}))
        paired = f"Differences to {self.against} are paired, with a 95 % interval by bootstrap over seeds and {units}."
        compared = INTERVAL.format(self.against) in self.header
        return applicable(
            {
                paired: compared,
                PUBLISHED_NOTE: any(title.endswith("*") for title in self.header),
                FITTED_NOTE: any(map(is_fitted, self.runs)),
                EDGE_NOTE: any(EDGE in title for title in self.header),
            }
        )

    def markdown(self, titled: bool) -> str:
        """Return text, table and notes, under a heading if ``titled``."""
        order = f"{verdict_summary(self.order[1])}\n" if self.order[1] else ""
        parts = [f"## {self.title}"] * titled + [text_facts(self.runs[0]), markdown(self.header, self.lines).rstrip()]
        notes = [*text_notes(self.runs[0]), *self.footnotes]
        return "\n\n".join([*parts, *notes]) + "\n" + f"\n{order}" * bool(order)

    def sections(self, figures: dict[str, Figure]) -> list[Section]:
        """Return the sections of the text on a page."""
        note = " ".join([f"{text_facts(self.runs[0])}. The worst run comes first.", *text_notes(self.runs[0])])
        drawn = {figure.title: figure.comparison_panels(self.runs) for figure in figures.values()}
        summary = verdict_summary(self.order[1])
        return [
            Section(self.title, note, [Table(self.header, self.lines)], footnotes=self.footnotes),
            *picture_sections(f"Pictures of {self.title}", several_panels(self.groups, self.runs)),
            *(section for title, panels in drawn.items() for section in picture_sections(title, panels)),
            *([Section("Order of the papers", summary, [Table(*self.order)], folded=True)] if self.order[1] else []),
        ]


def compare_runs(runs: list[dict[str, Any]], settings: DictConfig) -> Comparison:
    """Compare runs of one text; ``settings`` is the section ``report``."""
    groups = group_runs(runs)
    hidden = settings.show_published == "never" or (
        settings.show_published == "auto" and evaluated_dataset(runs[0]).get("own", False)
    )
    published = {} if hidden else plain(settings.published) or {}
    header, lines = compare_table(groups, settings.against, published)
    return Comparison(runs, groups, header, lines, order_table(groups, published), settings.against)


def joined_table(comparisons: list[Comparison]) -> tuple[list[str], TableRows]:
    """Return one table of several texts, with the union of their columns after one that names the text."""
    columns = list(dict.fromkeys(title for comparison in comparisons for title in comparison.header))
    lines = [
        [comparison.title, *(cells.get(title, "") for title in columns)]
        for comparison in comparisons
        for line in comparison.lines
        for cells in [dict(zip(comparison.header, line, strict=True))]
    ]
    return ["text", *columns], lines


def verdict_summary(lines: TableRows) -> str:
    """Return a sentence that counts the verdicts of an order table."""
    counts = Counter(line[-1] for line in lines)
    phrases = {
        "agrees": "agree with the paper in sign",
        "disagrees": "disagree",
        "no difference shown": "show no difference",
        "no interval": "have no interval",
        "too few units": "have too few units for a verdict",
    }
    return f"Of {len(lines)} pairs, {', '.join(f'{counts[name]} {words}' for name, words in phrases.items() if counts[name])}."
