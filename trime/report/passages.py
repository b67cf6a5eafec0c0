"""Passages of text as a picture: under each token the colour of the memory that contributed most to it."""

from __future__ import annotations

import textwrap
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from trime.report.canvas import canvas, memory_colours, save_picture
from trime.report.run_result import VOCABULARY, Record

WIDTH = 96  # characters of a line
FONT_SIZE, LINE, MARGIN = 9.4, 0.23, 0.15  # points, inches, inches; a letter of DejaVu Sans Mono then has 11 pixels at 140 dpi
CHARACTER = 0.602 * FONT_SIZE / 72  # inches: the letter is 0.602 em wide
MIDDLE, BASE, BAR = 0.4, 0.72, 0.24  # of a line's height: of its letters, and where the colour under them begins and ends
SOFT = "#5b6875"  # 5.7 : 1 on white
SHOWN_BEFORE = 2 * WIDTH  # characters of the text before a passage
ENTRIES = 3  # tokens of a passage whose best entry is shown
LEAST_SHOWN = 0.01  # probability from memories of such a token
PASSAGES = 2  # in a picture; a page has all


class Piece(NamedTuple):
    """A piece of a line, in ``ink``, above a bar of the colour ``paper``; None: no bar."""

    text: str
    paper: str | None = None
    share: float = 0.0  # height of the colour under it
    ink: str = "black"
    weight: str = "normal"


PassageLines = list[list[Piece]]


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
    """Return how many entries of a memory hold a token, as in `` (612 of 1,024 agree)``; nothing where it is not known."""
    count, entries = (agreeing or {}).get(memory, (0, 0))
    return f" ({count:,} of {entries:,} agree)" if entries > 1 else ""


def save_passages(samples: list[Sample], headline: str, path: Path) -> Path:
    """Draw the first passages with the memories that contributed to each token, and the best entries: PNG, SVG and PDF."""
    from matplotlib.patches import Rectangle

    legend = [Piece("largest share of the memories: ", ink=SOFT)]
    for name, colour in memory_colours(samples[0].tokens[0].parts).items():
        if name != VOCABULARY:
            legend += [Piece(f" {name} ", colour, 1.0), Piece(" ")]
    lines: PassageLines = [[Piece(headline, weight="bold")], [*legend, Piece("the higher, the larger", ink=SOFT)]]
    for sample in samples[:PASSAGES]:
        lines += [[], *passage_lines(sample), *entry_lines(sample)]
    width, height = WIDTH * CHARACTER + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    figure, (axis,) = canvas(width, height, 1)
    figure.set_layout_engine("none")
    axis.set_position((MARGIN / width, MARGIN / height, 1 - 2 * MARGIN / width, 1 - 2 * MARGIN / height))
    axis.set(xlim=(0, WIDTH), ylim=(len(lines), 0))
    axis.axis("off")
    for row, line in enumerate(lines):
        column = 0  # an axis has a unit for each character and each line
        for piece in line:
            if piece.paper:
                place, height = (column, row + BASE), BAR * piece.share
                axis.add_patch(Rectangle(place, len(piece.text), height, facecolor=piece.paper, linewidth=0))
            style: dict[str, Any] = {"family": "monospace", "fontsize": FONT_SIZE, "color": piece.ink, "weight": piece.weight}
            axis.text(column, row + MIDDLE, piece.text, va="center_baseline", **style)
            column += len(piece.text)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # of a letter that the font lacks: an empty box is drawn
        return save_picture(figure, path)


def passage_lines(sample: Sample) -> PassageLines:
    """Return the lines of a passage: its document, the end of the text before it in grey, and its tokens on their colours."""
    before = textwrap.wrap(" ".join(sample.before.split())[-SHOWN_BEFORE:], WIDTH)
    lines: PassageLines = [[Piece(sample.document[:WIDTH], weight="bold")], *([Piece(line, ink=SOFT)] for line in before)]
    lines.append([])
    for token in sample.tokens:
        for number, text in enumerate(token.shown.split("\n")):
            if number or sum(len(piece.text) for piece in lines[-1]) + len(text) > WIDTH:
                lines.append([])
            if text:
                lines[-1].append(Piece(text[:WIDTH], token.colour, token.share))
    return lines if lines[-1] else lines[:-1]


def entry_lines(sample: Sample) -> PassageLines:
    """Return a line for each of the words that owe most to memories: the largest memory's part, and its best entry."""
    # Punctuation says little about a memory.
    words = {token.text.strip(): token for token in sample.tokens if token.entries and token.text.strip().isalpha()}
    ranked = sorted(words.items(), key=lambda word: word[1].from_memories, reverse=True)
    lines: PassageLines = []
    for text, token in [word for word in ranked if word[1].from_memories >= LEAST_SHOWN][:ENTRIES]:
        largest = token.largest
        best = next((entry for entry in token.entries if entry.memory == largest), None)
        name, place = f" {text} ", f" ({best.place})" if best else ""
        label = f" p = {token.probability:.2f}: {token.parts[largest]:.2f} {largest}{agreement(token.agreeing, largest)}"
        label += ", …" * bool(best)
        context = " ".join(best.text.split())[len(name + label + place) - WIDTH :] if best else ""
        lines.append([Piece(name, token.colour, 1.0), Piece(label + context + place, ink=SOFT)])
    return [[], *lines] if lines else []
