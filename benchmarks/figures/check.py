"""Compare every figure of a page with its source; each fault is a line with page, line, printed and expected value."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures.compare import compare
from benchmarks.figures.kept import Kept
from benchmarks.figures.markdown import UNMEASURED, Block, blocks
from benchmarks.figures.numbers import numbers, quotation
from benchmarks.figures.sources import Sources
from benchmarks.figures.tables import check_cells

Faults = Iterator[tuple[int, str]]  # the line of a page, or the place in a block, and what is wrong there


def pages(root: Path) -> list[Path]:
    """Return the pages that print figures."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md")), *sorted((root / "benchmarks" / "results").rglob("*.md"))]


def check(root: Path) -> list[str]:
    """Return a line for each figure that is not what its source says, or has none."""
    kept = Kept(root)
    return [f"{path.relative_to(root)}:{line}: {fault}" for path in pages(root) for line, fault in check_page(path, kept)]


def check_page(path: Path, kept: Kept) -> Faults:
    """Check all blocks of a page, in its order, by line."""
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.note is None:
            first = next(numbers(block.text), None)
            if first:
                yield block.line_at(first.start()), f"prints {first[0]} without a note of its source"
        elif not block.text:
            yield block.line, "a note about figures stands before nothing"
        elif not block.note.excuse:
            names = Sources(kept, block.note.base).functions()
            yield from ((block.line_at(place), fault) for place, fault in check_block(block, names))


def check_block(block: Block, names: dict[str, Any]) -> Faults:
    """Check what a note quotes from a block, then a table's cells by their columns; no number may be left out."""
    assert block.note
    columns = {*block.titles(), "rows"} if block.is_table else set()
    covered = set[int]()
    for words, expression in block.note.expressions.items():
        if words not in columns:
            matches = list(quotation(words).finditer(block.text))
            if len(matches) == 1:
                covered |= {*range(*matches[0].span())}
                yield from ((matches[0].start(), fault) for fault in check_words(words, matches[0].groups(), expression, names))
            else:
                yield 0, f"has {len(matches)} times what its note quotes: {words}"
    yield from check_cells(block, covered, names) if block.is_table else uncovered(block, covered)


def check_words(words: str, printed: tuple[str, ...], expression: str, names: dict[str, Any]) -> Iterator[str]:
    """Compare the figures of words that a note quotes."""
    if not expression.startswith(UNMEASURED):
        yield from compare(printed, expression, names)
    elif "{}" in words:
        yield f"quote the numbers of what is not measured here: {words}"


def uncovered(block: Block, covered: set[int]) -> Faults:
    """Return the numbers of a block that its note does not quote."""
    for number in numbers(block.text):
        if number.start() not in covered:
            yield number.start(), f"prints {number[0]}, of which the note says nothing"
