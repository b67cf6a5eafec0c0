"""The LightningDataModule: batches of the training split in planned order, and windows for validation.

The training loader is one pass over all micro-batches of the whole training; the plans determine the epoch and
the content of micro-batch i, so that a resumed run continues with the next batch. (Lightning saves the loader's
state; a shuffling DataLoader would start another order.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl

from trime.data.batching import Batching
from trime.data.corpus import Split
from trime.data.segments import Segments, collate
from trime.data.vocabulary import SpecialIds
from trime.types import Batch


class ProcessShard(NamedTuple):
    """One of ``world`` processes; each takes contiguous rows of every batch."""

    rank: int = 0
    world: int = 1

    def of(self, rows: list[int]) -> list[int]:
        """Return this process's rows of a batch."""
        edges = [len(rows) * part // self.world for part in (self.rank, self.rank + 1)]
        return rows[edges[0] : edges[1]]


SINGLE_PROCESS = ProcessShard()


class PlannedLoader:
    """Loads ``steps`` batches in the order of the batching's plans, epoch after epoch; of each, this process's rows."""

    def __init__(
        self,
        text: Split,
        segments: Segments,
        batching: Batching,
        neighbours: Any,
        steps: int,
        special_ids: SpecialIds,
        share: ProcessShard = SINGLE_PROCESS,
    ):
        self.text, self.segments, self.batching, self.neighbours = text, segments, batching, neighbours
        self.steps, self.special_ids, self.share, self.step = steps, special_ids, share, 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        first, self.step = self.step, 0
        epoch_start = 0
        for epoch in range(self.steps):
            plan = self.plan(epoch)
            for number in range(max(first - epoch_start, 0), len(plan)):
                if epoch_start + number >= self.steps:
                    return
                self.step = epoch_start + number + 1
                yield self.batch(plan, number)
            epoch_start += len(plan)

    def plan(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch."""
        return self.batching.plan(self.segments, epoch, self.neighbours)

    def batch(self, plan: list[list[int]], number: int) -> Batch:
        """Return one batch of a plan; contiguous rows are continued within an epoch only."""
        rows, previous = self.share.of(plan[number]), None
        if self.batching.contiguous_rows:
            previous = self.share.of(plan[number - 1] if number else [len(self.segments)] * len(plan[number]))
        return collate(self.text, self.segments, rows, self.special_ids, previous)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def sequential_batches(windows: Segments, rows: int) -> list[list[int]]:
    """Return the windows in order, in batches of ``rows``."""
    return [list(range(start, min(start + rows, len(windows)))) for start in range(0, len(windows), rows)]


class WindowLoader:
    """Loads the batches of a plan once; of each, this process's rows."""

    def __init__(
        self,
        text: Split,
        windows: Segments,
        plan: list[list[int]],
        special_ids: SpecialIds,
        share: ProcessShard = SINGLE_PROCESS,
    ):
        self.text, self.windows, self.plan, self.special_ids, self.share = text, windows, plan, special_ids, share

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        previous: list[int] | None = None
        for rows in map(self.share.of, self.plan):
            same_rows = previous if previous and len(previous) == len(rows) else None
            yield collate(self.text, self.windows, rows, self.special_ids, same_rows)
            previous = rows


class TextModule(pl.LightningDataModule):
    """Provides the training and the validation loader to the trainer."""

    def __init__(self, train: PlannedLoader, valid: WindowLoader):
        super().__init__()
        self.train, self.valid = train, valid

    def train_dataloader(self) -> PlannedLoader:
        return self.train

    def val_dataloader(self) -> WindowLoader:
        return self.valid


def segment_terms(text: Split, segments: Segments, excluded_ids: list[int]) -> list[np.ndarray]:
    """Return the token ids of each segment for BM25, without the excluded (special) ones."""
    terms = []
    for begin, start, length in zip(segments.begin, segments.start, segments.length, strict=True):
        ids = np.asarray(text.tokens[begin + start : begin + start + length])
        terms.append(ids[~np.isin(ids, excluded_ids)])
    return terms
