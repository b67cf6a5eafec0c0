"""Split a Markdown page into blocks, each with the note that names the sources of its numbers.

A note is an HTML comment right before a block (a paragraph, list, heading, table, or fence without a language)::

    <!-- numbers: tables/main
    test := test(row)
    takes the model from {} to {} := test("vanilla"), test("cache")
    300 updates := not measured here: setting of the run
    -->

The first line may name a folder below ``benchmarks/results`` in which names are looked up. Every other line is
``WORDS := EXPRESSION``; an indented one continues the line before. WORDS quote the page, with ``{}`` for each number, and the
other numbers in them say what it is of; in a table WORDS may be a column's title, then EXPRESSION is evaluated for
each of its cells. ``<!-- not measured here: REASON -->`` excuses a whole block.
"""

from __future__ import annotations

import re
from typing import NamedTuple

OPENS, UNMEASURED = "numbers:", "not measured here:"
CELL = re.compile(r"(?:(?<=\|)|^)[^|]*")
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)\s]+\)")


class Note(NamedTuple):
    """A comment about numbers: the folder it names and its expressions by the words they explain, or its excuse."""

    line: int
    base: str
    expressions: dict[str, str]
    excuse: str = ""


class Cell(NamedTuple):
    """A cell of a table: its text, and the offset of that in the block."""

    text: str
    start: int

    @property
    def plain(self) -> str:
        """Return the text without backticks, as notes quote it."""
        return self.text.strip().replace("`", "")


class Block(NamedTuple):
    """A paragraph, table or other block without markup; ``line`` is the number of its first line, from 1."""

    line: int
    text: str
    note: Note | None

    @property
    def is_table(self) -> bool:
        """Return True if the block is a table."""
        return self.text.startswith("|")

    def line_at(self, place: int) -> int:
        """Return the line number in the page of an offset in the text."""
        return self.line + self.text.count("\n", 0, place)

    def table(self) -> list[list[Cell]]:
        """Return the cells of a table, line by line, the header first."""
        lines = list(re.finditer(r"^\|(.*)\|\s*$", self.text, re.MULTILINE))
        header, _, *rest = [[Cell(cell[0], line.start(1) + cell.start()) for cell in CELL.finditer(line[1])] for line in lines]
        return [header, *rest]

    def titles(self) -> list[str]:
        """Return the names of a table's columns: empty titles by number, repeated titles with a count."""
        named = [cell.plain or f"column {number}" for number, cell in enumerate(self.table()[0], 1)]
        counts = [named[: i + 1].count(title) for i, title in enumerate(named)]
        return [f"{title} {count}" if count > 1 else title for title, count in zip(named, counts, strict=True)]


def blocks(page: str) -> list[Block]:
    """Return all blocks of a page except fences with a language, which hold commands."""
    lines, parts, note = page.splitlines(), list[Block](), None
    start = 0
    while start < len(lines):
        end = end_of_block(lines, start)
        text = "\n".join(lines[start:end])
        if text.startswith("<!--"):
            note = note_of(text, start + 1) or note
        elif text.strip():
            is_code = bool(re.match(r"```\w", text))
            if note or not is_code:
                parts.append(Block(start + 1, "" if is_code else without_markup(text), note))
            note = None
        start = end
    return [*parts, Block(note.line, "", note)] if note else parts


def end_of_block(lines: list[str], start: int) -> int:
    """Return the line after the block that begins at ``start``; a blank line and a heading are blocks by themselves."""
    if lines[start].startswith("<!--"):
        return next((i + 1 for i in range(start, len(lines)) if "-->" in lines[i]), len(lines))
    if lines[start].startswith("```"):
        return next((i + 1 for i in range(start + 1, len(lines)) if lines[i].startswith("```")), len(lines))
    if lines[start].startswith("#") or not lines[start].strip():
        return start + 1
    others = (i for i in range(start, len(lines)) if not lines[i].strip() or lines[i].startswith(("<!--", "```")))
    return next(others, len(lines))


def without_markup(text: str) -> str:
    """Drop emphasis and the targets of links; lines stay where they are."""
    while (shorter := LINK.sub(r"\1", text)) != text:
        text = shorter
    return text.replace("**", "")


def note_of(comment: str, line: int) -> Note | None:
    """Read a comment; None if it is not about numbers."""
    content = comment.removeprefix("<!--").removesuffix("-->").strip()
    if content.startswith(UNMEASURED):
        return Note(line, "", {}, content.removeprefix(UNMEASURED).strip())
    if not content.startswith(OPENS):
        return None
    base, *rest = content.removeprefix(OPENS).splitlines() or [""]
    joined = re.sub(r"\n\s+", " ", "\n".join(rest))  # an indented line continues the one before
    pairs = [entry.partition(" := ") for entry in joined.splitlines() if entry.strip()]
    return Note(line, base.strip(), {words.strip(): expression.strip() for words, _, expression in pairs})
