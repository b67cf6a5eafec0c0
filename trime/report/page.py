"""One self-contained HTML file of a run or of several: tables, curves, samples with their memories, the commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from trime.io import write_atomically
from trime.report.figures.canvas import BLUE, GREY, ORANGE, Panel, drawn
from trime.report.tables import Lines, is_numeric

COLOURS = {
    "vocabulary": GREY,
    "local": BLUE,
    "long": "#5fa3c7",
    "external": ORANGE,
    "ngram": "#6a4c93",
    "ngram_document": "#b08ccf",
}
SHOWN_BEFORE = 400  # characters of the text before a passage


@dataclass(frozen=True)
class Table:
    """Of text cells; the last line is emphasised where it is the run's ``own``."""

    header: list[str]
    lines: Lines
    own: bool = False

    @property
    def figures(self) -> list[bool]:
        """Which columns hold figures, and so stand to the right."""
        return [column > 0 and is_numeric([line[column] for line in self.lines]) for column in range(len(self.header))]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    note: str = ""
    tables: list[Table] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)  # SVG
    passages: list[dict[str, Any]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """What a page says."""

    title: str
    facts: list[str]
    sections: list[Section]


def write_page(page: Page, path: Path) -> Path:
    """The page as one file that needs no other; all text is escaped."""
    room = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    write_atomically(path, room.get_template("page.html").render(page=page))
    return path


def pictured(title: str, panels: list[Panel], note: str = "") -> list[Section]:
    """A section of panels, if there are any."""
    return [Section(title, note, pictures=[drawn(panel) for panel in panels])] if panels else []


def sampled(samples: list[dict[str, Any]]) -> list[Section]:
    """A section of passages, if there are any."""
    if not samples:
        return []
    note = (
        f"Test text as {samples[0]['row']} reads it. The darker a token, the more of its probability came from memories; "
        "choose one to see from which, and the entries that gave most."
    )
    return [Section("Samples with their memories", note, passages=[passage_of(sample) for sample in samples])]


def passage_of(sample: dict[str, Any]) -> dict[str, Any]:
    """A passage for the template; the token to which memories gave most is open."""
    tokens = [token_of(told) for told in sample["tokens"]]
    best = max(range(len(tokens)), key=lambda place: tokens[place]["given"])
    tokens[best]["open"] = True
    before = sample["before"]
    cut = before[-SHOWN_BEFORE:]
    return {"document": sample["document"], "before": ("… " if cut != before else "") + cut, "tokens": tokens}


def token_of(told: dict[str, Any]) -> dict[str, Any]:
    """A token, its parts as widths of a bar, and the share that memories gave."""
    whole, parts = told["probability"], told["parts"]
    given = whole - parts["vocabulary"]
    return told | {
        "open": False,
        "text": "end of line" if "\n" in told["text"] else told["text"].strip() or "space",
        "given": given,
        "share": min(1.0, max(0.0, given / whole)) if whole else 0.0,
        "split": ", ".join(f"{name} {part:.4f}" for name, part in parts.items()),
        "bars": [{"width": 100 * part / (whole or 1), "colour": COLOURS.get(name, BLUE)} for name, part in parts.items()],
    }


def commands(runs: list[dict[str, Any]]) -> Section:
    """The command of each run."""
    known = list(dict.fromkeys(run["command"] for run in runs if run.get("command")))
    note = (
        "Each is skipped as far as its artefacts exist." if known else "No run tells its command: config.yaml lies beside it."
    )
    return Section("Commands", note, commands=known)
