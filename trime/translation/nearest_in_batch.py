"""TRIME-MT's training memory: the nearest contexts of the other sentences (section 4.4; the published recipe)."""

from __future__ import annotations

import math

import torch
from torch.utils.checkpoint import checkpoint

from trime.common.choices import Metric
from trime.common.types import Contexts, Float, LogMass, Tensor
from trime.token_memory.similarity import similarity
from trime.token_memory.train.distributed import gather_contexts
from trime.token_memory.train.in_batch import InBatch
from trime.token_memory.train.objective.tiles import slices
from trime.token_memory.train.visibility import Visibility

ROWS = 512  # queries whose similarities are in memory at a time


class NearestInBatch(InBatch):
    """The ``k`` most similar contexts of the batch under a visibility (None: all), at a training temperature.

    Gradient reaches only the selected contexts. ValueError unless ``k`` and ``temperature`` are positive.
    """

    def __init__(self, visibility: Visibility, k: int | None, temperature: float = 1.0, metric: Metric = "ip"):
        if k is not None and k < 1:
            raise ValueError(f"k={k}: keep at least one memory, or null for all: set memory.k")
        super().__init__(visibility, temperature=temperature, metric=metric)
        self.k = k

    def mass(
        self,
        query: Contexts,
        contexts: Contexts,
        divisor: Float[Tensor, " t"],
        draw: float | None = None,
        progress: float = 1.0,
    ) -> LogMass:
        """Return the mass [t n] of the nearest contexts; ``contexts`` are those of this process. ``draw`` has no effect."""
        memory, blocks = gather_contexts(contexts), []
        for rows in slices(len(query.token), ROWS) or [slice(0, 0)]:  # a process may have no rows
            block = query.take(rows)
            hidden = ~self.visibility.sees(block.positions, memory.positions)
            inputs = block.g, memory.g, hidden, block.token, memory.token, divisor
            blocks.append(checkpoint(self.masses, *inputs, use_reentrant=False))  # backward computes similarities again
        targets, totals = zip(*blocks, strict=True)
        return LogMass(torch.cat(targets, 1), torch.cat(totals, 1))

    def masses(self, query: Tensor, memory: Tensor, hidden: Tensor, target: Tensor, token: Tensor, divisor: Tensor):  # type: ignore[no-untyped-def]
        """Return the log-masses [t n] of the targets and in all, over the nearest visible contexts."""
        score = similarity(query, memory, self.metric).masked_fill(hidden, -math.inf)
        score, index = score.topk(min(self.k or len(memory), len(memory)), dim=1)
        scaled = score / (divisor * self.temperature)[:, None, None]
        # Gradient reaches only the selected contexts: top-k passes it to them.
        other = token[index] != target[:, None]
        return safe_logsumexp(scaled.masked_fill(other, -math.inf)), safe_logsumexp(scaled)


def safe_logsumexp(scores: Float[Tensor, "t n k"]) -> Float[Tensor, "t n"]:
    """Return the logsumexp, whose gradient here is zero, not NaN, where no score is finite."""
    empty = scores.isinf().all(-1, keepdim=True)
    result = scores.masked_fill(empty, 0).logsumexp(-1)
    return result.masked_fill(empty.squeeze(-1), -math.inf)
