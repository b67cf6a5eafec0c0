"""The LightningDataModule of a text: batches of the training split in planned order, and windows for validation.

The training loader is one pass over all micro-batches of the whole training; the plans determine the epoch and
the content of micro-batch i, so that a resumed run continues with the next batch. (Lightning saves the loader's
state; a shuffling DataLoader would start another order.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl

from trime.common.io import lock_of, locked, partial_of, write_json
from trime.common.types import Batch
from trime.data.batching import Batching
from trime.data.corpus import Corpus, Split, build_corpus, training_vocabulary
from trime.data.datasets import Dataset
from trime.data.segments import Segments, collate, cut, document_offsets, parse_token_count, training_segments
from trime.data.vocabulary import SpecialIds
from trime.errors import UserError

TOKENISATION_FILE = "reading.json"  # beside a text that prepare_data made: how it was read


class ProcessShard(NamedTuple):
    """One of ``world`` processes; each takes contiguous rows of every batch."""

    rank: int = 0
    world: int = 1

    def rows_for_rank(self, rows: list[int]) -> list[int]:
        return rows[len(rows) * self.rank // self.world : len(rows) * (self.rank + 1) // self.world]


SINGLE_PROCESS = ProcessShard()


@dataclass(eq=False)
class PlannedLoader:
    """Loads ``steps`` batches in the order of the batching's plans, epoch after epoch; of each, this process's rows."""

    text: Split
    segments: Segments
    batching: Batching
    neighbours: Any
    steps: int
    special_ids: SpecialIds
    shard: ProcessShard = SINGLE_PROCESS
    step: int = 0  # the next batch of a resumed pass

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        first, self.step = self.step % max(1, self.steps), 0  # a pass to the end is followed by one from the start
        segments, epoch_start = self.segments, 0
        if self.text.sources is not None:  # pairs are planned by their longer side
            document, offset, start, length, context = segments
            longer = np.maximum(length, self.text.sources.lengths[document])
            segments = Segments(document, offset, start, longer, context)
        for epoch in range(self.steps):
            plan = self.batching.plan(segments, epoch, self.neighbours)
            for number in range(max(first - epoch_start, 0), len(plan)):
                if epoch_start + number >= self.steps:
                    return
                self.step = epoch_start + number + 1
                before = None
                if self.batching.contiguous_rows:  # rows are continued within an epoch only
                    before = self.shard.rows_for_rank(plan[number - 1] if number else [len(segments)] * len(plan[number]))
                yield collate(self.text, self.segments, self.shard.rows_for_rank(plan[number]), self.special_ids, before)
            epoch_start += len(plan)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def sequential_batches(windows: Segments, rows: int) -> list[list[int]]:
    """Return the windows in order, in batches of ``rows``."""
    return [list(range(start, min(start + rows, len(windows)))) for start in range(0, len(windows), rows)]


def batches_by_length(windows: Segments, rows: int) -> list[list[int]]:
    """Return batches of ``rows`` windows of like length, the longest first, so that little padding is read."""
    order = np.argsort(-windows.length, kind="stable")
    return [order[batch].tolist() for batch in sequential_batches(windows, rows)]


@dataclass(eq=False)
class WindowLoader:
    """Loads the batches of a plan once; of each, this process's rows."""

    text: Split
    windows: Segments
    plan: list[list[int]]
    special_ids: SpecialIds
    shard: ProcessShard = SINGLE_PROCESS

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        previous: list[int] | None = None
        for rows in map(self.shard.rows_for_rank, self.plan):
            same_rows = previous if previous and len(previous) == len(rows) else None
            yield collate(self.text, self.windows, rows, self.special_ids, same_rows)
            previous = rows


def reading_of(reader: Any) -> dict[str, Any]:
    """Return the class and the settings of a dataset, and those of its tokenizer, without where its text lies."""
    settings = {
        name: value
        for name, value in vars(reader).items()
        if isinstance(value, str | int | float | bool | dict | list | None)
        and name not in ("path", "cache", "name", "own")
        and not name.startswith("_")  # found in the files
        and not isinstance(getattr(type(reader), name, None), cached_property)
    }
    tokenizer = getattr(reader, "tokenizer", None)
    return {"class": type(reader).__qualname__, **settings} | ({"tokenizer": reading_of(tokenizer)} if tokenizer else {})


class TextDataModule(pl.LightningDataModule):
    """The batches of a text for ``pl.Trainer(max_steps=N)``: training segments as planned, then validation windows in order.

    ``folder`` holds the tokenised text, which ``prepare_data`` makes from ``dataset`` if it is missing; None: it is there. A
    segment has ``length`` tokens; unless ``bounded``, a split is cut as one document. ``validate_tokens`` limits a validation;
    ``neighbours`` [segments k] is the table that batching by BM25 needs.
    """

    def __init__(
        self,
        dataset: Dataset | None,
        folder: Path | str,
        batching: Batching,
        length: int = 512,
        bounded: bool = True,
        validate_tokens: int | str | None = None,
        neighbours: np.ndarray | None = None,
    ):
        super().__init__()
        self.dataset, self.folder, self.batching, self.length, self.bounded = dataset, Path(folder), batching, length, bounded
        self.validate_tokens, self.neighbours = parse_token_count(validate_tokens), neighbours

    def prepare_data(self) -> None:
        """Tokenise the dataset unless ``folder`` holds it; UserError where it holds another text, or other files."""
        if self.dataset is None:
            return
        if (self.folder / "statistics.json").is_file():
            # The fingerprint is only of the text: the same text may have been tokenised or split otherwise.
            reading, fingerprint = self.folder / TOKENISATION_FILE, Corpus(self.folder).statistics.get("fingerprint")
            now = json.loads(json.dumps(reading_of(self.dataset)))
            same = not reading.is_file() or json.loads(reading.read_text(encoding="utf-8")) == now
            if not same or fingerprint != self.dataset.fingerprint():
                raise UserError(
                    f"{self.folder} holds another text than {self.dataset.name}, or one that was tokenised or split otherwise: "
                    "delete it, or name another folder"
                )
            return
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder} holds files that are not a corpus: name another folder")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock_of(self.folder), f"preparing {self.folder}"):
            if not (self.folder / "statistics.json").is_file():  # another process may have finished it
                partial = partial_of(self.folder)
                partial.mkdir(exist_ok=True)
                write_json(partial / TOKENISATION_FILE, reading_of(self.dataset), indent=None)
                build_corpus(self.dataset, partial, training_vocabulary(self.dataset))
                partial.replace(self.folder)

    def setup(self, stage: str | None = None) -> None:
        """Open the corpus and cut its splits; UserError if the text is too short for a segment, or for the rows of a batch."""
        self.corpus = self.open_corpus()
        self.text, self.valid = self.corpus.split("train"), self.corpus.split("valid")
        self.segments, self.windows = self.cut()
        size, number = self.batching.size, len(self.segments)
        if self.batching.contiguous_rows and number < size:
            raise UserError(f"batching.size={size} rows need a segment each, but there are only {number}: lower it")

    def open_corpus(self) -> Corpus:
        """Return the corpus in ``folder``; UserError if there is none."""
        return Corpus(self.folder)

    def cut(self) -> tuple[Segments, Segments]:
        """Return the segments of the training split, and the windows of the validation split."""
        segments = training_segments(self.text, self.length, self.bounded)
        return segments, cut(document_offsets(self.valid, self.bounded), self.length, tokens=self.validate_tokens)

    @property
    def shard(self) -> ProcessShard:
        """The trainer's share of every batch: all of it without a trainer."""
        return ProcessShard(self.trainer.global_rank, self.trainer.world_size) if self.trainer else SINGLE_PROCESS

    @property
    def steps(self) -> int:
        """Micro-batches of the whole training; of one epoch without a trainer. UserError if the trainer lacks ``max_steps``."""
        if self.trainer is None:
            return len(self.batching.plan(self.segments, 0, self.neighbours))
        if self.trainer.max_steps < 0:
            raise UserError("the batches of the whole training are planned: set pl.Trainer(max_steps=N), N updates")
        steps = self.trainer.max_steps * self.trainer.accumulate_grad_batches
        overfit: float = self.trainer.overfit_batches  # type: ignore[attr-defined]
        if isinstance(overfit, float) and overfit:
            raise UserError(f"overfit_batches={overfit}: it must be a number of batches, which are repeated")
        return min(steps, int(overfit)) if overfit else steps

    def train_dataloader(self) -> PlannedLoader:
        planned = (self.text, self.segments, self.batching, self.neighbours)
        return PlannedLoader(*planned, self.steps, self.corpus.vocabulary.special_ids, self.shard)

    def val_dataloader(self) -> WindowLoader:
        """Rows that are continued in training are continued here too."""
        if self.batching.contiguous_rows:
            plan = self.batching.plan(self.windows, 0, None)
        else:
            plan = sequential_batches(self.windows, self.batching.size)
        return WindowLoader(self.valid, self.windows, plan, self.corpus.vocabulary.special_ids, self.shard)
