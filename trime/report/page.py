"""Self-contained HTML pages of one run or several: tables, curves, samples with their memories, commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trime.common.io import write_atomically
from trime.report.canvas import Panel, draw_svg, memory_colours
from trime.report.passages import Sample, SampledToken, annotate_token, rendered
from trime.report.run_result import VOCABULARY, RunResult
from trime.report.tables import Table

BESIDE = (".csv", ".json", ".jsonl", ".md", ".pdf", ".png", ".svg", ".yaml")  # kinds of files that are named beside a page
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
    write_atomically(path, rendered("page.html", page=page, files=files))
    return path


def place_of(page: Path) -> str:
    """Return the last line of a run or a sweep: its page, and the files beside it."""
    kinds: dict[str, list[str]] = {}
    for file in sorted(page.parent.iterdir()):
        if file.suffix in BESIDE and file != page:
            kinds.setdefault(file.stem, []).append(file.suffix)
    names = [f"{stem}{'|'.join(suffixes)}" for stem, suffixes in kinds.items()]
    return f"page: {page}" + (f"\nbeside it: {', '.join(names)}" if names else "")


def picture_sections(title: str, panels: list[Panel], note: str = "") -> list[Section]:
    """Return a section of panels as a list, which is empty if there are no panels."""
    return [Section(title, note, pictures=[draw_svg(panel) for panel in panels])] if panels else []


def sample_sections(samples: list[Sample], content: str) -> list[Section]:
    """Return a section of passages as a list, which is empty if there are none; ``content`` is as in test text, scored."""
    if not samples:
        return []
    note = (
        f"{content} by {samples[0].row}. The higher the colour under a token, the larger the share of its probability that "
        "came from memories; the colour is that of the memory that gave most. Choose a token to see its parts and its sources."
    )
    colours = {name: colour for name, colour in memory_colours(samples[0].tokens[0].parts).items() if name != VOCABULARY}
    passages = []
    for sample in samples:
        opened = first_shown(sample.tokens)
        shown = sample.before[-SHOWN_BEFORE:]
        before = ("… " if shown != sample.before else "") + shown
        tokens = [annotate_token(token, colours, token is opened) for token in sample.tokens]
        passages.append({"document": sample.document, "before": before, "tokens": tokens})
    return [Section("Samples with their memories", note, passages=passages, colours=colours)]


def first_shown(tokens: Sequence[SampledToken]) -> SampledToken:
    """Return the token whose sources are shown first: of those that are words, the one that owes most to memories."""
    return max(tokens, key=lambda token: (token.text.strip().isalpha() and len(token.text.strip()) > 2, token.from_memories))


def commands_section(runs: Sequence[RunResult], command: str | None = None) -> Section:
    """Return the section with the command that made a report, if there is one, and the command of each run."""
    # Runs of one sweep share their command.
    known = list(dict.fromkeys(run.command for run in runs if run.command))
    if not known and not command:
        note = "No run recorded its command; its settings are in config.yaml beside its results."
    elif command and known:
        note = "The first made this report; each of the others makes one run. Run again, they reuse the artefacts that exist."
    else:
        note = "Run again, each command reuses the artefacts that already exist."
    return Section("Commands", note, commands=[*([command] if command else []), *known])
