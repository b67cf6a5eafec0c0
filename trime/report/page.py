"""Self-contained HTML pages of one run or several: tables, curves, samples with their memories, commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from trime.common.io import write_atomically
from trime.report.canvas import Panel, draw_svg, memory_colours
from trime.report.passages import Sample, SampledToken, part_texts
from trime.report.run_result import VOCABULARY, RunResult
from trime.report.tables import Table

SHOWN_BEFORE = 400  # characters of the text before a passage


@dataclass(frozen=True)
class Section:
    """A heading with a note, tables, pictures, passages and commands; ``folded`` sections show their heading and note."""

    title: str
    note: str = ""
    tables: list[Table] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)  # SVG
    passages: list[dict[str, Any]] = field(default_factory=list)
    colours: dict[str, str] = field(default_factory=dict)  # of the passages' tokens, by memory
    commands: list[str] = field(default_factory=list)
    footnotes: list[str] = field(default_factory=list)  # below the tables
    folded: bool = False  # shown when its heading is selected
    emphasise_last: bool = False  # the last line of its tables


@dataclass(frozen=True)
class Page:
    """The content of a page."""

    title: str
    facts: list[str]
    sections: list[Section]
    files: list[str] = field(default_factory=list)  # names of files beside the page, which it links to if they exist


def write_page(page: Page, path: Path) -> Path:
    """Write a page as one file that needs no other; all text is escaped. Return its path."""
    files = [name for name in page.files if (path.parent / name).is_file()]
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    write_atomically(path, environment.get_template("page.html").render(page=page, files=files))
    return path


def picture_sections(title: str, panels: list[Panel], note: str = "") -> list[Section]:
    """Return a section of panels as a list, which is empty if there are no panels."""
    return [Section(title, note, pictures=[draw_svg(panel) for panel in panels])] if panels else []


def sample_sections(samples: list[Sample], content: str) -> list[Section]:
    """Return a section of passages as a list, which is empty if there are none; ``content`` is as in test text, scored."""
    if not samples:
        return []
    note = (
        f"{content} by {samples[0].row}. A token has the colour of the memory that contributed most; the darker it "
        "is, the larger the share of all memories. Select one to see each share and the entries that contributed most."
    )
    colours = memory_colours(samples[0].tokens[0].parts)
    del colours[VOCABULARY]
    passages = []
    for sample in samples:
        tokens = [token_content(token) for token in sample.tokens]
        # The page opens on the token that owes most to memories.
        largest = max(range(len(tokens)), key=lambda number: sample.tokens[number].from_memories)
        tokens[largest]["open"] = True
        before = ("… " if len(sample.before) > SHOWN_BEFORE else "") + sample.before[-SHOWN_BEFORE:]
        passages.append({"document": sample.document, "before": before, "tokens": tokens})
    return [Section("Samples with their memories", note, passages=passages, colours=colours)]


def token_content(token: SampledToken) -> dict[str, Any]:
    """Return a token for the template, with the parts of its probability as a bar and the share that came from memories."""
    colours = memory_colours(token.parts)
    return {
        "open": False,
        "shown": token.shown,
        "text": "end of line" if "\n" in token.text else token.text.strip() or "space",
        "probability": token.probability,
        "colour": token.colour,
        "share": token.share,
        "split": ", ".join(part_texts(token.parts, token.agreeing)),
        "entries": sorted(token.entries, key=lambda entry: entry.memory != token.largest),
        "bars": [
            {"width": 100 * part / (token.probability or 1), "colour": colours[name]} for name, part in token.parts.items()
        ],
    }


def commands_section(runs: Sequence[RunResult], command: str | None = None) -> Section:
    """Return the section with the command that made a report, if there is one, and the command of each run."""
    known = list(dict.fromkeys(run.command for run in runs if run.command))
    if not known and not command:
        note = "No run recorded its command; its settings are in config.yaml beside its results."
    elif command and known:
        note = "The first made this report; each of the others makes one run. Run again, they reuse the artefacts that exist."
    else:
        note = "Run again, each command reuses the artefacts that already exist."
    return Section("Commands", note, commands=[*([command] if command else []), *known])
