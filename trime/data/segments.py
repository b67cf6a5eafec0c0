"""Rows of text: a split cut into segments for training, or into windows for evaluation.

Inputs are the targets shifted right by one within the document, ``<eos>`` before its first token, so
every token of a split is a target exactly once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from trime.data.corpus import Split
from trime.data.vocabulary import Ends
from trime.types import Batch, UserError

SCALES = {"k": 10**3, "M": 10**6, "G": 10**9}


class Segments(NamedTuple):
    """Row i covers tokens [start, start + length) of a document; the first ``context`` of them are not scored.

    ``begin`` is where the document's first token lies in the split.
    """

    document: np.ndarray
    begin: np.ndarray
    start: np.ndarray
    length: np.ndarray
    context: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def scored(self) -> int:
        """How many tokens are scored in all."""
        return int((self.length - self.context).sum())

    def take(self, index: np.ndarray | list[int] | slice) -> Segments:
        return Segments(*(column[index] for column in self))


def count_of(tokens: int | float | str | None) -> int | None:
    """A budget of tokens: a number, or one with k, M or G behind it (100k, 2M)."""
    if tokens is None:
        return None
    written = str(tokens)
    digits, scale = (written[:-1], SCALES[written[-1]]) if written[-1:] in SCALES else (written, 1)
    try:
        count = int(float(digits) * scale)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise UserError(f"tokens={tokens} is no number of tokens: write 100000, 100k or 2M, or null for all")
    return count


def document_edges(split: Split, bounded: bool) -> np.ndarray:
    """Where documents begin and end; not ``bounded``: the whole stream as one document, the published way."""
    return split.offsets if bounded else split.offsets[[0, -1]]


def shares(lengths: np.ndarray, tokens: int | None, sample: str = "starts") -> np.ndarray:
    """Return how many tokens of each document a budget of ``tokens`` takes, from its start.

    ``sample="starts"``: as many of each document, more where others are short. ``"documents"``: whole documents, fewer of
    them, drawn in an order that depends on their number alone; the last one is cut where the budget ends.
    """
    if tokens is None or tokens >= lengths.sum():
        return lengths
    if sample == "documents":
        order = np.random.RandomState(0).permutation(len(lengths))
        before = np.zeros_like(lengths)
        before[order] = np.cumsum(lengths[order]) - lengths[order]
        return np.clip(tokens - before, 0, lengths)
    taken, left = np.zeros_like(lengths), tokens
    while left > 0:
        more = np.minimum(lengths - taken, max(1, left // max(1, int((lengths > taken).sum()))))
        more = np.where(np.cumsum(more) <= left, more, 0)
        taken, left = taken + more, left - int(more.sum())
    return taken


def cut(offsets: np.ndarray, block: int, context: int = 0, tokens: int | None = None, sample: str = "starts") -> Segments:
    """Blocks of ``block`` scored tokens, each with up to ``context`` earlier tokens of its document before it."""
    kept = shares(np.diff(offsets), tokens, sample)
    counts = -(-kept // block)
    document = np.repeat(np.arange(len(kept)), counts)
    order = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    scored_from = order * block
    return with_context(offsets, document, scored_from, np.minimum(scored_from + block, kept[document]), context)


def with_context(
    offsets: np.ndarray, document: np.ndarray, first: np.ndarray, end: np.ndarray, context: np.ndarray | int
) -> Segments:
    """Rows that score [first, end) of documents, with up to ``context`` tokens before them."""
    start = np.maximum(first - context, 0)
    return Segments(document, offsets[document], start, end - start, first - start)


def cut_lines(
    split: Split,
    offsets: np.ndarray,
    eos: int,
    block: int,
    context: int = 0,
    tokens: int | None = None,
    sample: str = "starts",
) -> Segments:
    """Blocks of whole lines, as many as fit ``block`` tokens (fairseq's sample-break-mode complete).

    A longer line is a block of its own, whose context is so much shorter that a window has at most
    ``block + context`` tokens, where the line leaves room for any.
    """
    kept, parts = shares(np.diff(offsets), tokens, sample), []
    for document, (begin, length) in enumerate(zip(offsets[:-1], kept, strict=True)):
        ends = np.flatnonzero(np.asarray(split.tokens[begin : begin + length]) == eos) + 1
        edges = packed([*ends.tolist(), int(length)], block)
        parts.append(np.stack([np.full(len(edges) - 1, document), edges[:-1], edges[1:]]))
    document_, first, end = np.concatenate(parts, axis=1)
    return with_context(offsets, document_, first, end, np.minimum(context, np.maximum(context + block - (end - first), 0)))


def packed(ends: list[int], block: int) -> np.ndarray:
    """Where blocks begin and end that take whole lines greedily; ``ends`` are the lines' ends."""
    edges, last = [0], 0
    for end in ends:
        if end - edges[-1] > block and last > edges[-1]:
            edges.append(last)
        last = end
    return np.array(edges if edges[-1] == last else [*edges, last])


def collate(split: Split, segments: Segments, index: list[int], ends: Ends, before: list[int] | None = None) -> Batch:
    """The rows ``index`` as one batch, padded on the right; -1 is a row of padding alone, as is the only one of no row.

    A row is fresh at a document's start, and where it does not follow on what the row held ``before``.
    """
    if not index:
        return nothing(ends.pad)
    document, begin, start, length, context = segments.take(index)
    filled = np.array(index) >= 0
    rows = Segments(np.where(filled, document, -1), begin, start * filled, length * filled, context)
    width = max(1, int(rows.length.max()))
    targets = np.full((len(index), width), ends.pad, np.int64)
    tokens = targets.copy()
    for i, (begin, start, length) in enumerate(zip(rows.begin, rows.start, rows.length, strict=True)):
        text = split.tokens[begin + start : begin + start + length]
        targets[i, :length] = text
        tokens[i, 1:length] = text[:-1]
        tokens[i, 0] = split.tokens[begin + start - 1] if start else ends.eos
    column, fresh = np.arange(width), rows.start == 0
    if before is not None:
        fresh |= np.array(before) + 1 != index
    scored = (column >= rows.context[:, None]) & (column < rows.length[:, None])
    columns = (tokens, targets, rows.length, scored, rows.document, np.array(index), rows.start, fresh)
    return Batch(*(torch.from_numpy(part) for part in columns))


def nothing(pad: int) -> Batch:
    """One row of one cell of padding: the part of a process for which a batch has no rows."""
    cell, one = torch.full((1, 1), pad), torch.zeros(1, dtype=torch.long)
    return Batch(cell, cell, one, cell != cell, one - 1, one - 1, one, one == 0)


def check_length(offsets: np.ndarray, length: int, what: str) -> None:
    """Raises UserError where no document fills one segment."""
    longest = int(np.diff(offsets).max())
    if longest < length:
        raise UserError(f"the {what} split's longest document has {longest} tokens, a segment {length}: lower segments.length")
