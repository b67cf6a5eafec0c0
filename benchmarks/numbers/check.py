"""Compare every number of a page with its source; each fault is a line with page, line, printed and expected value."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.numbers.compare import compare
from benchmarks.numbers.kept import SourceFiles
from benchmarks.numbers.markdown import UNMEASURED, Block, blocks
from benchmarks.numbers.printed import numbers, quotation
from benchmarks.numbers.sources import Sources
from benchmarks.numbers.tables import check_cells

Faults = Iterator[tuple[int, str]]  # (line of the page or offset in the block, message)


def pages(root: Path) -> list[Path]:
    """Return the pages that print numbers."""
    folders = (root / "docs", root / "benchmarks" / "results")
    return [root / "README.md", *(page for folder in folders for page in sorted(folder.rglob("*.md")))]


def check(root: Path) -> list[str]:
    """Return a message for each number that does not match its source or has none."""
    files = SourceFiles(root)
    return [f"{path.relative_to(root)}:{line}: {fault}" for path in pages(root) for line, fault in check_page(path, files)]


def check_page(path: Path, files: SourceFiles) -> Faults:
    """Yield the faults of a page by line, in order."""
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.note is None:
            first = next(numbers(block.text), None)
            if first:
                yield block.line_at(first.start()), f"prints {first[0]} without a note that names its source"
        elif not block.text:
            yield block.line, "a note about numbers has no block after it"
        elif not block.note.excuse:
            names = Sources(files, block.note.base).functions()
            yield from ((block.line_at(place), fault) for place, fault in check_block(block, names))


def check_block(block: Block, names: dict[str, Any]) -> Faults:
    """Yield the faults of a block: first of what its note quotes, then of a table's cells; no number may be left out."""
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
                yield 0, f"contains {len(matches)} times what its note quotes: {words}"
    yield from check_cells(block, covered, names) if block.is_table else uncovered(block, covered)


def check_words(words: str, printed: tuple[str, ...], expression: str, names: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of the numbers in a quotation."""
    if not expression.startswith(UNMEASURED):
        yield from compare(printed, expression, names)
    elif "{}" in words:
        yield f"write out the numbers that are not measured here, without {{}}: {words}"


def uncovered(block: Block, covered: set[int]) -> Faults:
    """Yield a fault for each number of a block that its note does not quote."""
    for number in numbers(block.text):
        if number.start() not in covered:
            yield number.start(), f"prints {number[0]}, which the note does not mention"
