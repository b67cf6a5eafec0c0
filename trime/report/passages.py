"""Passages of text with the contributions of the memories to each token."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader

from trime.report.canvas import memory_colours
from trime.report.run_result import VOCABULARY, Record


class Entry(Record):
    """An entry of a memory that holds a token: its share of the token's probability, the text up to it, and where that is."""

    memory: str
    share: float
    text: str
    place: str


class SampledToken(Record):
    """A token with the parts of its probability by source, the vocabulary first."""

    text: str
    shown: str  # on a page
    probability: float
    parts: dict[str, float]
    entries: list[Entry]
    agreeing: dict[str, tuple[int, int]] | None = None  # of each memory's entries, those that hold the token, and all

    @property
    def from_memories(self) -> float:
        return self.probability - self.parts[VOCABULARY]

    @property
    def share(self) -> float:
        """Return the share of the probability that came from memories, in [0, 1]."""
        return min(1.0, max(0.0, self.from_memories / self.probability)) if self.probability else 0.0

    @property
    def largest(self) -> str:
        """Return the memory that contributed most, and ``vocabulary`` if there is none."""
        return max((name for name in self.parts if name != VOCABULARY), key=self.parts.__getitem__, default=VOCABULARY)

    @property
    def colour(self) -> str:
        return memory_colours(self.parts)[self.largest]


class Sample(Record):
    """A passage of test, the text before it, and the row that attributed its tokens to memories."""

    document: str
    row: str
    before: str
    tokens: list[SampledToken]


def part_texts(parts: dict[str, float], agreeing: dict[str, tuple[int, int]] | None) -> list[str]:
    """Return the parts of a token's probability, each with how many of the memory's entries hold the token."""
    return [f"{name} {part:.4f}{agreement(agreeing, name)}" for name, part in parts.items()]


def agreement(agreeing: dict[str, tuple[int, int]] | None, memory: str) -> str:
    """Describe the number of a memory's entries that hold a token, as in `` (612 of 1,024 agree)``; nothing if unknown."""
    count, entries = (agreeing or {}).get(memory, (0, 0))
    return f" ({count:,} of {entries:,} agree)" if entries > 1 else ""


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


def annotate_token(token: SampledToken, colours: dict[str, str], opened: bool = False) -> Annotated:
    """Return a token that a run's row explained; the entries of the memory that contributed most come first."""
    sources = [
        Source(entry.memory, colours.get(entry.memory, token.colour), entry.place, f"… {entry.text}")
        for entry in sorted(token.entries, key=lambda entry: entry.memory != token.largest)
    ]
    parts = [(name, f"{part:.4f}", agreement(token.agreeing, name).strip(" ()")) for name, part in token.parts.items()]
    label = "end of line" if "\n" in token.text else token.text.strip() or "space"
    share, probability = f"{token.share:.3f}", f"{token.probability:.4f}"
    return Annotated(token.shown, label, probability, share, token.colour, parts, sources, opened)
