"""Text whose tokens say which memories proposed them, as HTML: in reports, on pages of their own, and in the explorer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader

from trime.report.passages import SampledToken, agreement


class Source(NamedTuple):
    """A source of a token: the memory's name, the place, and the text there."""

    memory: str
    colour: str
    place: str
    text: str


class Annotated(NamedTuple):
    """A token as it is shown: ``share`` of its probability is the memories', most of it that of the ``colour``'s."""

    text: str
    label: str
    probability: str
    share: str
    colour: str
    parts: list[tuple[str, str, str]]  # the name of each part, its size, and a note
    sources: list[Source]
    opened: bool = False  # its sources are shown first


@cache
def templates() -> Environment:
    """Return the templates of pages; all that they show is escaped."""
    return Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)


def rendered(template: str, **content: Any) -> str:
    """Return the HTML that a template of this folder makes of ``content``."""
    return templates().get_template(template).render(content)


def annotated(token: SampledToken, colours: dict[str, str], opened: bool = False) -> Annotated:
    """Return a token that a run's row explained; the entries of the memory that contributed most come first."""
    sources = [
        Source(entry.memory, colours.get(entry.memory, token.colour), entry.place, f"… {entry.text}")
        for entry in sorted(token.entries, key=lambda entry: entry.memory != token.largest)
    ]
    parts = [(name, f"{part:.4f}", agreement(token.agreeing, name).strip(" ()")) for name, part in token.parts.items()]
    label = "end of line" if "\n" in token.text else token.text.strip() or "space"
    share, probability = f"{token.share:.3f}", f"{token.probability:.4f}"
    return Annotated(token.shown, label, probability, share, token.colour, parts, sources, opened)
