"""Self-contained HTML pages of one run or several: tables, curves, samples with their memories, commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from trime.io import write_atomically
from trime.report.figures.canvas import Panel, colour_of, draw_svg
from trime.report.figures.passages import from_memories, largest_memory, memory_share, part_texts
from trime.report.tables import TableRows, is_numeric

SHOWN_BEFORE = 400  # characters of the text before a passage


@dataclass(frozen=True)
class Table:
    """A table of text cells, whose last line may be emphasised."""

    header: list[str]
    lines: TableRows
    emphasise_last: bool = False

    @property
    def numeric(self) -> list[bool]:
        """Return for each column whether it holds numbers, which are aligned to the right."""
        return [column > 0 and is_numeric([line[column] for line in self.lines]) for column in range(len(self.header))]


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


def sample_sections(samples: list[dict[str, Any]], what: str) -> list[Section]:
    """Return a section of passages as a list, which is empty if there are no samples; ``what`` they are: test text, scored."""
    if not samples:
        return []
    note = (
        f"{what} by {samples[0]['row']}. A token has the colour of the memory that contributed most; the darker it "
        "is, the larger the share of all memories. Select one to see each share and the entries that contributed most."
    )
    memories = [name for name in samples[0]["tokens"][0]["parts"] if name != "vocabulary"]
    colours = {name: colour_of(name) for name in memories}
    passages = [passage_content(sample) for sample in samples]
    return [Section("Samples with their memories", note, passages=passages, colours=colours)]


def passage_content(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a passage for the template; the token to which memories contributed most is open."""
    tokens = [token_content(token) for token in sample["tokens"]]
    max(tokens, key=lambda token: token["from_memories"])["open"] = True
    context = sample["before"]
    shown = context[-SHOWN_BEFORE:]
    return {"document": sample["document"], "before": ("… " if shown != context else "") + shown, "tokens": tokens}


def token_content(token: dict[str, Any]) -> dict[str, Any]:
    """Return a token for the template, with the parts of its probability as a bar and the share that came from memories."""
    probability, parts = token["probability"], token["parts"]
    return token | {
        "open": False,
        "text": "end of line" if "\n" in token["text"] else token["text"].strip() or "space",
        "from_memories": from_memories(token),
        "colour": colour_of(largest_memory(parts)),
        "share": memory_share(token),
        "split": ", ".join(part_texts(token)),
        "entries": sorted(token["entries"], key=lambda entry: entry["memory"] != largest_memory(parts)),
        "bars": [{"width": 100 * part / (probability or 1), "colour": colour_of(name)} for name, part in parts.items()],
    }


def commands_section(runs: list[dict[str, Any]], command: str | None = None) -> Section:
    """Return the section with the command that made a report, if there is one, and the command of each run."""
    known = list(dict.fromkeys(run["command"] for run in runs if run.get("command")))
    if not known and not command:
        note = "No run recorded its command; its settings are in config.yaml beside its results."
    elif command and known:
        note = "The first made this report; each of the others makes one run. Run again, they reuse the artefacts that exist."
    else:
        note = "Run again, each command reuses the artefacts that already exist."
    return Section("Commands", note, commands=[*([command] if command else []), *known])
