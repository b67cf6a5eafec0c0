"""Passes over an encoded split in which rows are scored with their memories, in spans that do not depend on one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from trime.common.progress import Progress
from trime.lab.shards import prefixed, unprefixed
from trime.scoring.loss_sums import LossSums
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec
from trime.scoring.scorer import Scorer, memory_names
from trime.stages.encode import Encode, read_windows
from trime.stages.memories import Memories
from trime.token_memory.search.datastore import Shards
from trime.token_memory.test.base import StateScope, Window

SPAN = 2**13  # scored tokens of a span, at least


@dataclass(frozen=True)
class Scoring:
    """Settings of scoring that all rows share."""

    scaled_interpolation: bool  # Eq. 8 divides by sqrt(d)
    sorted_windows: bool  # windows of a document do not follow one another


class Span(NamedTuple):
    """Rows ``low`` to ``high`` of an encoded split; ``before`` scored tokens come before its own ``tokens``."""

    low: int
    high: int
    before: int
    tokens: int


def spans_of(encoded: Encode, scope: StateScope) -> list[Span]:
    """Cut an encoded split so that no state reaches into a span: between windows, between documents, or not at all."""
    columns = Shards(encoded.path()).iter_columns("segment", "document", "scored")
    first, document, scored = (torch.cat(column) for column in zip(*((starts(s), d, k) for s, d, k in columns), strict=True))
    if encoded.windowing.sorted and scope:
        scope = StateScope.CORPUS  # windows of a document do not follow one another
    cuts = {StateScope.NONE: first, StateScope.DOCUMENT: starts(document), StateScope.CORPUS: torch.zeros_like(first)}[scope]
    before = torch.cat([scored.new_zeros(1, dtype=torch.long), scored.cumsum(0)])
    edges = [0]
    for row in cuts.nonzero().flatten().tolist():
        if before[row] - before[edges[-1]] >= SPAN:
            edges.append(row)
    edges.append(len(scored))
    return [Span(low, high, int(before[low]), int(before[high] - before[low])) for low, high in pairwise(edges)]


def starts(number: torch.Tensor) -> torch.Tensor:
    """Return the mask of the elements that differ from the one before; the first one does."""
    return torch.cat([torch.ones(1, dtype=torch.bool), number.diff() != 0])


def span_file(folder: Path, span: Span, rows: str = "") -> Path:
    """Return the file of a span that is scored, for some ``rows`` if not for all."""
    return folder / f"part-{rows}{span.low:09d}-{span.high:09d}.safetensors"


def build_scorer(
    scoring: Scoring, rows: Sequence[MixtureSpec | FittedMixtureSpec], memories: Memories, encoded: Encode
) -> Scorer:
    """Return a scorer of rows, with the memories that they use opened for the queries of an encoded split."""
    sizes = sorted({size for row in rows if any(row.sizes) for size in row.sizes})
    opened = memories.open_all(encoded.summary(), sizes, memory_names(rows))
    return Scorer(rows, opened, scoring.scaled_interpolation, scoring.sorted_windows)


def sums_as_tensors(sums: Sequence[LossSums]) -> dict[str, torch.Tensor]:
    """Return the summed losses of each row as tensors of a shard's file."""
    return {name: tensor for row, each in enumerate(sums) for name, tensor in prefixed(f"row-{row}", each.tensors()).items()}


def add_sums(sums: Sequence[LossSums], tensors: dict[str, torch.Tensor]) -> None:
    """Add the tensors of ``sums_as_tensors`` to the sums of the whole text."""
    for row, each in enumerate(sums):
        each.put_tensors(unprefixed(tensors, f"row-{row}"))


def windows_of(encoded: Encode, span: Span) -> Iterator[Window]:
    """Yield the windows of a span."""
    return read_windows(encoded.path(), encoded.hardware.device, span.low, span.high)


def with_progress(encoded: Encode, title: str) -> Iterator[Window]:
    """Yield the windows of an encoded split under a progress bar."""
    with Progress(total=encoded.summary()["tokens"], unit="tok", unit_scale=True, desc=f"{title} {encoded.split}") as bar:
        for window in read_windows(encoded.path(), encoded.hardware.device):
            yield window
            bar.update(len(window.vocabulary.total))
