"""The LightningDataModule: batches of the training split in planned order, and windows for validation.

The training loader is one pass over all micro-batches of the whole training: micro-batch i belongs to
epoch and place that the plans decide, so that a resumed run goes on with the very next batch. (Lightning
saves the loader's state; a shuffling DataLoader would start another order.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl

from trime.data.batching import Batching
from trime.data.corpus import Split
from trime.data.segments import Segments, collate
from trime.data.vocabulary import Ends
from trime.types import Batch


class Share(NamedTuple):
    """Which of ``world`` processes this is; each takes contiguous rows of every batch."""

    rank: int = 0
    world: int = 1

    def of(self, rows: list[int]) -> list[int]:
        """This process's rows of a batch."""
        edges = [len(rows) * part // self.world for part in (self.rank, self.rank + 1)]
        return rows[edges[0] : edges[1]]


ALONE = Share()


class PlannedLoader:
    """``steps`` batches in the order of the batching's plans, epoch after epoch; this process's share of each."""

    def __init__(
        self,
        text: Split,
        segments: Segments,
        batching: Batching,
        neighbours: Any,
        steps: int,
        ends: Ends,
        share: Share = ALONE,
    ):
        self.text, self.segments, self.batching, self.neighbours = text, segments, batching, neighbours
        self.steps, self.ends, self.share, self.step = steps, ends, share, 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        first, self.step = self.step, 0
        passed = 0
        for epoch in range(self.steps):
            plan = self.plan(epoch)
            for number in range(max(first - passed, 0), len(plan)):
                if passed + number >= self.steps:
                    return
                self.step = passed + number + 1
                yield self.batch(plan, number)
            passed += len(plan)

    def plan(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch."""
        return self.batching.plan(self.segments, epoch, self.neighbours)

    def batch(self, plan: list[list[int]], number: int) -> Batch:
        """One batch of a plan; rows that read on do so within an epoch."""
        rows = self.share.of(plan[number])
        last = (plan[number - 1] if number else [len(self.segments)] * len(plan[number])) if self.batching.reads_on else None
        return collate(self.text, self.segments, rows, self.ends, last and self.share.of(last))

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def in_order(windows: Segments, rows: int) -> list[list[int]]:
    """Windows as they come, ``rows`` at a time."""
    return [list(range(start, min(start + rows, len(windows)))) for start in range(0, len(windows), rows)]


class WindowLoader:
    """The batches of a plan, once, of which this process has its share."""

    def __init__(self, text: Split, windows: Segments, plan: list[list[int]], ends: Ends, share: Share = ALONE):
        self.text, self.windows, self.plan, self.ends, self.share = text, windows, plan, ends, share

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        before: list[int] | None = None
        for rows in map(self.share.of, self.plan):
            yield collate(self.text, self.windows, rows, self.ends, before if before and len(before) == len(rows) else None)
            before = rows


class TextModule(pl.LightningDataModule):
    """Hands both loaders to the trainer."""

    def __init__(self, train: PlannedLoader, valid: WindowLoader):
        super().__init__()
        self.train, self.valid = train, valid

    def train_dataloader(self) -> PlannedLoader:
        return self.train

    def val_dataloader(self) -> WindowLoader:
        return self.valid


def terms_of(text: Split, segments: Segments, left_out: list[int]) -> list[np.ndarray]:
    """The token ids of each segment that BM25 compares: special symbols left out."""
    found = []
    for begin, start, length in zip(segments.begin, segments.start, segments.length, strict=True):
        ids = np.asarray(text.tokens[begin + start : begin + start + length])
        found.append(ids[~np.isin(ids, left_out)])
    return found
