"""Cut a split into segments for training or windows for evaluation, and collate them into batches.

Inputs are the targets shifted right by one within the document, with ``<eos>`` before its first token, so that
every token of a split is a target exactly once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from trime.common.choices import parse_quantity
from trime.common.types import Batch
from trime.data.corpus import Corpus, Split
from trime.data.vocabulary import SpecialIds
from trime.errors import UserError

FEWEST_LONG = 4  # a budget is spread over at least this many of the documents that are longer than it


class Segments(NamedTuple):
    """Row i covers tokens [start, start + length) of a document; the first ``context`` of them are not scored."""

    document: np.ndarray
    document_offset: np.ndarray  # of the document's first token, in the split
    start: np.ndarray
    length: np.ndarray
    context: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def scored(self) -> int:
        return int((self.length - self.context).sum())

    def take(self, index: np.ndarray | list[int] | slice) -> Segments:
        return Segments(*(column[index] for column in self))


def parse_token_count(tokens: int | float | str | None) -> int | None:
    """Parse a number of tokens, with k, M, G or B behind it or without (100k, 2M); UserError if it is none. None stays None."""
    if tokens is None:
        return None
    try:
        return parse_quantity(tokens)
    except ValueError:
        raise UserError(f"tokens={tokens} is not a number of tokens: write 100000, 100k or 2M, or null for all") from None


def scored_bytes(corpus: Corpus, split: str, segments: Segments) -> float:
    """Return the bytes of text that the scored tokens of segments predict."""
    text, sizes = corpus.split(split), corpus.text_sizes(split)
    offsets = text.offsets
    # Prepared by an older version: the split counts as one document.
    if sizes is None:
        sizes, offsets = np.array([corpus.statistics["splits"][split]["bytes"]]), offsets[[0, -1]]
    # Only the bytes of documents are known. Their tokens share them by their lengths: exactly those of tokens that are bytes,
    # or byte pairs, whose symbols have a character for each byte; otherwise about as their symbols and a space have them.
    symbols = corpus.vocabulary.symbols
    ways = [[1] * len(symbols), [len(symbol) for symbol in symbols], [len(symbol.encode()) + 1 for symbol in symbols]]
    for length in map(np.array, ways):
        before = np.concatenate([[0], np.cumsum(length[text.tokens])])  # summed lengths of the tokens before each
        if np.array_equal(np.diff(before[offsets]), sizes):
            break
    of_documents = np.maximum(np.diff(before[offsets]), 1)
    bytes_before = np.concatenate([[0], np.cumsum(length[text.tokens] * np.repeat(sizes / of_documents, np.diff(offsets)))])
    first = segments.document_offset + segments.start
    return float((bytes_before[first + segments.length] - bytes_before[first + segments.context]).sum())


def document_offsets(split: Split, bounded: bool) -> np.ndarray:
    """Return the offsets of documents; if not ``bounded``, the whole split is one document, as in the published code."""
    return split.offsets if bounded else split.offsets[[0, -1]]


def allocate_tokens(lengths: np.ndarray, tokens: int | None, sample: str = "starts") -> np.ndarray:
    """Return the number of tokens that a budget of ``tokens`` takes of each document.

    ``sample="starts"``: the same number from each document, more where others are short. ``"documents"``: whole documents in
    a random order that depends only on their number; the last one is cut where the budget ends. A document that is longer
    than the budget counts for a quarter of it, so that a few are scored, or for what the shorter ones leave.
    """
    if tokens is None or tokens >= lengths.sum():
        return lengths
    if sample == "documents":
        long = lengths > tokens
        left = tokens - int(lengths[~long].sum())
        taken = np.where(long, max(-(-tokens // FEWEST_LONG), -(-left // max(1, int(long.sum())))), lengths)
        order = np.random.RandomState(0).permutation(len(lengths))
        before = np.zeros_like(lengths)
        before[order] = np.cumsum(taken[order]) - taken[order]
        return np.clip(tokens - before, 0, taken)
    allocated, remaining = np.zeros_like(lengths), tokens
    while remaining > 0:
        more = np.minimum(lengths - allocated, max(1, remaining // max(1, int((lengths > allocated).sum()))))
        more = np.where(np.cumsum(more) <= remaining, more, 0)
        allocated, remaining = allocated + more, remaining - int(more.sum())
    return allocated


def allocate_ranges(lengths: np.ndarray, tokens: int | None, sample: str = "starts") -> tuple[np.ndarray, np.ndarray]:
    """Return the begin and end of the range that a budget takes of each document."""
    allocated = allocate_tokens(lengths, tokens, sample)
    # Only part of a document longer than the budget is taken: its middle.
    in_middle = sample == "documents" and tokens is not None and lengths > tokens
    first = np.where(in_middle, (lengths - allocated) // 2, 0)
    return first, first + allocated


def cut(offsets: np.ndarray, block: int, context: int = 0, tokens: int | None = None, sample: str = "starts") -> Segments:
    """Cut documents into segments of ``block`` scored tokens, each with up to ``context`` earlier tokens of the document."""
    first, last = allocate_ranges(np.diff(offsets), tokens, sample)
    counts = -(-(last - first) // block)
    document = np.repeat(np.arange(len(counts)), counts)
    order = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    scored_from = first[document] + order * block
    return with_context(offsets, document, scored_from, np.minimum(scored_from + block, last[document]), context)


def with_context(
    offsets: np.ndarray, document: np.ndarray, first: np.ndarray, end: np.ndarray, context: np.ndarray | int
) -> Segments:
    """Return segments that score the tokens [first, end) of documents, with up to ``context`` tokens before them."""
    start = np.maximum(first - context, 0)
    return Segments(document, offsets[document], start, end - start, first - start)


def cut_lines(
    split: Split, offsets: np.ndarray, eos: int, block: int, context: int = 0, tokens: int | None = None, sample: str = "starts"
) -> Segments:
    """Cut documents into segments of whole lines with at most ``block`` tokens (fairseq's sample-break-mode complete)."""
    columns = []
    for document, (first, end) in enumerate(zip(*allocate_ranges(np.diff(offsets), tokens, sample), strict=True)):
        line_ends = np.flatnonzero(np.asarray(split.tokens[offsets[document] + first : offsets[document] + end]) == eos) + 1
        edges, last = [0], 0  # whole lines are packed greedily
        for line_end in [*line_ends.tolist(), int(end - first)]:
            if line_end - edges[-1] > block and last > edges[-1]:
                edges.append(last)
            last = line_end
        bounds = first + np.array(edges if edges[-1] == last else [*edges, last])
        columns.append(np.stack([np.full(len(bounds) - 1, document), bounds[:-1], bounds[1:]]))
    # A line longer than a block is a segment of its own, with less context, so that windows stay within block + context.
    documents, first, end = np.concatenate(columns, axis=1)
    return with_context(offsets, documents, first, end, np.minimum(context, np.maximum(context + block - (end - first), 0)))


def training_segments(split: Split, length: int, bounded: bool) -> Segments:
    """Return the segments of the training split; UserError if no document fills one."""
    offsets = document_offsets(split, bounded)
    longest = int(np.diff(offsets).max())
    if longest < length:
        raise UserError(
            f"the training split's longest document has {longest} tokens, a segment {length}: lower segments.length"
        )
    return cut(offsets, length)


def collate(
    split: Split, segments: Segments, index: list[int], special_ids: SpecialIds, before: list[int] | None = None
) -> Batch:
    """Collate the segments ``index`` into a batch, padded on the right; -1 gives a row of padding.

    An empty index, of a process that has no rows of a batch, gives one row of one cell of padding. A row is fresh at the first
    segment of a document, and where it does not continue the segment that it held ``before``. In parallel text, ``source``
    holds the sentences that the rows translate.
    """
    if not index:
        cell, one = torch.full((1, 1), special_ids.pad), torch.zeros(1, dtype=torch.long)
        batch = Batch(cell, cell, one, cell != cell, one - 1, one - 1, one, one == 0)
        return batch if split.sources is None else batch._replace(source=cell)
    document, offset, start, length, context = segments.take(index)
    filled = np.array(index) >= 0
    rows = Segments(np.where(filled, document, -1), offset, start * filled, length * filled, context)
    width = max(1, int(rows.length.max()))
    targets = np.full((len(index), width), special_ids.pad, np.int64)
    tokens = targets.copy()
    for i, (offset, start, length) in enumerate(zip(rows.document_offset, rows.start, rows.length, strict=True)):
        text = split.tokens[offset + start : offset + start + length]
        targets[i, :length] = text
        tokens[i, 1:length] = text[:-1]
        tokens[i, 0] = split.tokens[offset + start - 1] if start else special_ids.eos
    follows = np.where(np.array(index) > 0, segments.document[np.array(index) - 1], -1)  # the document of the segment before
    column, fresh = np.arange(width), (rows.start == 0) | (follows != rows.document)
    if before is not None:
        fresh |= np.array(before) + 1 != index
    scored = (column >= rows.context[:, None]) & (column < rows.length[:, None])
    columns = (tokens, targets, rows.length, scored, rows.document, np.array(index), rows.start, fresh)
    batch = Batch(*(torch.from_numpy(each) for each in columns))
    if split.sources is None:
        return batch
    none = split.tokens[:0]  # of a row without a segment
    sentences = [split.sources.document(number) if number >= 0 else none for number in rows.document.tolist()]
    padded = np.full((len(index), max(1, max(map(len, sentences)))), special_ids.pad, np.int64)
    for i, sentence in enumerate(sentences):
        padded[i, : len(sentence)] = sentence
    return batch._replace(source=torch.from_numpy(padded))
