"""Check a table's cells by the expressions of their columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from benchmarks.numbers.compare import differing, flat
from benchmarks.numbers.expression import NoValueError, evaluate
from benchmarks.numbers.markdown import UNMEASURED, Block, Cell
from benchmarks.numbers.printed import numbers
from trime.report.bootstrap import Difference

NOT_SHOWN = re.compile(r"no\s+difference\s+shown")


def check_cells(block: Block, covered: set[int], names: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield offset and message for each fault in a table's cells; numbers at ``covered`` offsets were checked already.

    In an expression ``label`` is the line's first cell, or where that is empty the one above, ``cell("TITLE")`` the text of
    another cell, and ``row`` the value of the note's ``rows`` for this line, or the label where it has none.
    """
    assert block.note
    expressions, label = block.note.expressions, ""
    columns, (header, *lines) = block.titles(), block.table()
    for cell in header:
        if places(cell) - covered:
            yield cell.start, f"prints {cell.plain}, which the note does not mention"
    for line in lines:
        label = line[0].plain or label
        texts = {title: cell.plain for title, cell in zip(columns, line, strict=False)}
        known = names | {"label": label, "cell": texts.__getitem__}
        for title, cell in zip(columns, line, strict=False):
            if places(cell) - covered or (NOT_SHOWN.search(cell.text) and title in expressions):
                for fault in check_cell(cell, expressions.get(title), expressions.get("rows"), known):
                    yield cell.start, f"column {title}: {fault}"


def places(cell: Cell) -> set[int]:
    """Return the offsets in the block at which a cell's numbers begin."""
    return {cell.start + number.start() for number in numbers(cell.text)}


def check_cell(cell: Cell, expression: str | None, rows: str | None, names: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of a cell's numbers, and of whether it says that no difference is shown."""
    printed = tuple(number[0] for number in numbers(cell.text))
    if expression is None:
        yield f"prints {', '.join(printed)}, which the note does not mention"
    elif not expression.startswith(UNMEASURED):
        says_none = bool(NOT_SHOWN.search(cell.text))
        try:
            row = evaluate(rows or "label", names)
            value = evaluate(expression, names | {"row": row})
            if isinstance(value, Difference) and says_none is value.significant:
                yield f"{'says' if says_none else 'does not say'} no difference shown, expected {value}: {expression}"
            if printed:
                yield from (f"{fault}: {expression}" for fault in differing(printed, flat(value)))
        except NoValueError as error:
            yield str(error)
