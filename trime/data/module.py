"""The LightningDataModule: batches of the training split in planned order, and windows for validation.

The training loader is one pass over all micro-batches of the whole training: micro-batch i belongs to
epoch and place that the plans decide, so that a resumed run goes on with the very next batch. (Lightning
saves the loader's state; a shuffling DataLoader would start another order.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytorch_lightning as pl

from trime.data.batching import Batching
from trime.data.corpus import Split
from trime.data.segments import Segments, collate
from trime.types import Batch


class PlannedLoader:
    """``steps`` batches in the order of the batching's plans, epoch after epoch."""

    def __init__(self, text: Split, segments: Segments, batching: Batching, neighbours: Any, steps: int, eos: int):
        self.text, self.segments, self.batching, self.neighbours = text, segments, batching, neighbours
        self.steps, self.eos, self.step = steps, eos, 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        first, self.step = self.step, 0
        passed = 0
        for epoch in range(self.steps):
            plan = self.batching.plan(self.segments, epoch, self.neighbours)
            for number in range(max(first - passed, 0), len(plan)):
                if passed + number >= self.steps:
                    return
                self.step = passed + number + 1
                yield collate(self.text, self.segments, plan[number], self.eos)
            passed += len(plan)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class WindowLoader:
    """Rows in order, ``rows`` at a time."""

    def __init__(self, text: Split, windows: Segments, rows: int, eos: int):
        self.text, self.windows, self.rows, self.eos = text, windows, rows, eos

    def __len__(self) -> int:
        return -(-len(self.windows) // self.rows)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.windows), self.rows):
            index = list(range(start, min(start + self.rows, len(self.windows))))
            yield collate(self.text, self.windows, index, self.eos)


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
