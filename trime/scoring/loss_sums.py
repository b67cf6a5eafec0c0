"""Losses summed by document over a grid of settings, and a row's results at its best settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trime.common.metrics import perplexity
from trime.common.types import Float, Int, Tensor
from trime.data.corpus import Corpus
from trime.data.notes import FEW_DOCUMENTS
from trime.errors import UserError
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec
from trime.token_memory.test.base import Window

BUCKETS = {"> 10k": 10_000, "1k-10k": 1_000, "100-1k": 100, "10-100": 10, "≤ 10": -1}  # lower bounds, exclusive
PART_TOKENS, MAX_PARTS = 1024, 200  # tokens of the shortest part, and the largest number of parts


def dev_frequency(corpus: Corpus) -> np.ndarray:
    """Return the number of occurrences of every word on dev."""
    return np.bincount(corpus.split("valid").tokens, minlength=len(corpus.vocabulary))


class TokenMeans:
    """Accumulates the sum and the count of a per-token value for every word; ``vocabulary`` is the number of words."""

    def __init__(self, vocabulary: int):
        self.sum, self.count = np.zeros(vocabulary), np.zeros(vocabulary, np.int64)

    def add(self, token: Int[Tensor, " n"], value: Float[Tensor, " n"]) -> None:
        np.add.at(self.sum, token.cpu().numpy(), value.double().cpu().numpy())
        np.add.at(self.count, token.cpu().numpy(), 1)

    @property
    def tokens(self) -> int:
        return int(self.count.sum())

    def buckets(self, frequency: np.ndarray) -> list[dict[str, Any]]:
        """Return token count and mean by frequency bucket, then over all words; the mean of an empty bucket is None."""
        remaining, rows = np.ones(len(frequency), bool), []
        for name, bound in BUCKETS.items():
            inside = remaining & (frequency > bound)
            remaining &= ~inside
            rows.append({"bucket": name, **self.mean(inside)})
        return [*rows, {"bucket": "average", **self.mean(np.ones(len(frequency), bool))}]

    def mean(self, inside: np.ndarray) -> dict[str, Any]:
        """Return token count and mean over the words of a mask."""
        tokens = int(self.count[inside].sum())
        return {"tokens": tokens, "mean": float(self.sum[inside].sum()) / tokens if tokens else None}


class LossSums:
    """Summed losses over the grid, with token counts, by parts of ``PART_TOKENS`` tokens of a document."""

    def __init__(self) -> None:
        self.losses: dict[tuple[int, int], tuple[Tensor, int]] = {}  # by document and part

    def add(self, window: Window, score: Float[Tensor, "s a n"]) -> None:
        """Add the log-probabilities of a window by memory size, setting and token."""
        self.add_losses(window, -score.double().sum(-1))

    def add_losses(self, window: Window, loss: Float[Tensor, "s a"]) -> None:
        """Add the summed losses of a window by memory size and setting."""
        key = int(window.contexts.positions.document[0]), window.scored_from // PART_TOKENS
        self.put(key, loss.cpu(), len(window.query.token))

    def put(self, key: tuple[int, int], loss: Tensor, count: int) -> None:
        """Add a summed loss of ``count`` tokens to a part of a document; UserError where it is NaN."""
        if loss.isnan().any():
            raise UserError(
                f"the loss of document {key[0]}, from token {key[1] * PART_TOKENS:,} on, is not a number (NaN): the model, a "
                "memory or a mixture computes values that are not finite"
            )
        before, counted = self.losses.get(key, (torch.zeros(()), 0))
        self.losses[key] = before + loss, counted + count

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums as tensors, to be kept in a file; there must be one at least."""
        losses, counts = zip(*self.losses.values(), strict=True)
        return {"part": torch.tensor([*self.losses]), "loss": torch.stack(losses), "count": torch.tensor(counts)}

    def put_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        keys, counts = tensors["part"].tolist(), tensors["count"].tolist()
        for (document, part), loss, count in zip(keys, tensors["loss"], counts, strict=True):
            self.put((document, part), loss, count)

    @property
    def total(self) -> Float[Tensor, "s a"]:
        """The summed loss by memory size and setting."""
        return sum((loss for loss, _ in self.losses.values()), torch.zeros(()))

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.losses.values())

    def bootstrap_units(self, size: int, choice: int) -> tuple[str, list[list[float]]]:
        """Return the name of the bootstrap's unit, and the summed loss and tokens of each unit: documents, or spans of few."""
        few, length = len({document for document, _ in self.losses}) < FEW_DOCUMENTS, 1
        # Parts double in length until there are at most MAX_PARTS.
        while few and len({(document, part // length) for document, part in self.losses}) > MAX_PARTS:
            length *= 2
        units: dict[tuple[int, int], list[float]] = {}
        for (document, part), (loss, count) in self.losses.items():
            unit = units.setdefault((document, part // length if few else 0), [0.0, 0])
            unit[0] += float(loss[size, choice])
            unit[1] += count
        return f"parts of at most {length * PART_TOKENS:,} tokens" if few else "documents", list(units.values())


def sum_by_document(document: Int[Tensor, " n"], loss: Float[Tensor, " n"]) -> LossSums:
    """Return the losses summed by document and part."""
    sums, start = LossSums(), 0
    for number, size in zip(*(part.tolist() for part in document.unique_consecutive(return_counts=True)), strict=True):
        for part, first in enumerate(range(start, start + size, PART_TOKENS)):
            part_loss = loss[first : min(first + PART_TOKENS, start + size)]
            sums.put((number, part), part_loss.double().sum()[None, None], len(part_loss))
        start += size
    return sums


def summarize_row(row: MixtureSpec | FittedMixtureSpec, sums: LossSums) -> dict[str, Any]:
    """Return the best settings of a row, its loss there, the best loss at each memory size, and units for a bootstrap."""
    tokens = sums.tokens
    mean = sums.total / tokens
    size, choice = divmod(int(mean.argmin()), mean.shape[1])
    tuned: dict[str, float] = dict(row.choices()[choice])
    curve = {}
    if any(row.sizes):  # (0,) where no memory of the row has sizes
        tuned["memory_size"] = row.sizes[size]
        curve = dict(zip(map(str, row.sizes), mean.min(1).values.tolist(), strict=True))
    loss = float(mean[size, choice])
    unit, units = sums.bootstrap_units(size, choice)
    return {
        "memories": row.label,
        "mixture": row.mixture,
        "tuned": tuned,
        "loss": loss,
        "perplexity": perplexity(loss),
        "tokens": tokens,
        "by_memory_size": curve,
        "documents": units,
        "bootstrap_unit": unit,
    }
