"""Eviction for each head of keys by itself (Attendre footnote 2): heads become rows of the batch, each with its own slots."""

from __future__ import annotations

from trime.models.attendre import AttentionOutput, Queries
from trime.types import Tensor


def heads_to_rows(entries: tuple[Tensor, ...], queries: Queries, heads: int) -> tuple[tuple[Tensor, ...], Queries]:
    """Return the entries and the queries of each head as a row; what waits with the queries is cut into equal parts.

    Entries are keys and values [b l g d] and a document [b l]; queries [b l h d] wait with the residual stream [b l e] and a
    document. ``heads`` is g, which h and e are multiples of.
    """
    (key, value, document), (query, x, waiting) = entries, queries.columns
    rows = tuple(split_last(part.flatten(2), heads).unflatten(-1, (1, -1)) for part in (key, value))
    of_query = split_last(query.flatten(2), heads).unflatten(-1, (-1, query.shape[-1]))
    parts = (of_query, split_last(x, heads), repeated(waiting, heads))
    return (*rows, repeated(document, heads)), Queries(parts, repeated(queries.position, heads))


def rows_to_heads(output: AttentionOutput, heads: int) -> AttentionOutput:
    """Return the output of rows that ``heads_to_rows`` made, with its heads side by side again; what was retrieved stays."""
    x, document = output.payload
    attended = join_rows(output.attended.flatten(2), heads).unflatten(-1, (-1, output.attended.shape[-1]))
    return output._replace(
        attended=attended, payload=(join_rows(x, heads), document[::heads]), position=output.position[::heads]
    )


def split_last(x: Tensor, heads: int) -> Tensor:
    """Return [b l e] as [b·g l e/g]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)


def join_rows(x: Tensor, heads: int) -> Tensor:
    """Return [b·g l e/g] as [b l e]."""
    return x.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Return [n ...] as [n·g ...]: each row as often as there are heads."""
    return x.repeat_interleave(heads, 0)


def side_by_side(x: Tensor, heads: int) -> Tensor:
    """Return [b·g m] as [b g·m]: the slots of all heads of a row."""
    return x.unflatten(0, (-1, heads)).flatten(1)
