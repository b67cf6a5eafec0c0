"""Measurements of a pass over text: losses of a row with their time, time and size of a memory, hits of a search."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trime.common.metrics import device_seconds, processor_seconds
from trime.common.types import Bool, Contexts, LogMass, Tensor
from trime.scoring.loss_sums import LossSums
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec
from trime.token_memory.search.datastore import KNNMemory
from trime.token_memory.test.base import Memory, Window

TOP = (1, 8, 64, 1024)  # numbers of entries among which the target is looked for


class RowScores:
    """The summed losses of a row and the memories' share of each probability, with the time that it takes to score them."""

    def __init__(self, row: MixtureSpec | FittedMixtureSpec):
        self.row, self.score_window = row, row.window_scorer()
        self.sums, self.shares = LossSums(), list[torch.Tensor]()
        self.seconds = self.processor_seconds = 0.0

    def add(self, window: Window, masses: dict[str, LogMass]) -> None:
        """Score a window, given the masses of the row's memories."""
        started, processor = device_seconds(), processor_seconds()
        score = self.score_window(window, masses)
        self.sums.add(window, score)
        if self.row.memories:
            of_vocabulary = self.score_window.vocabulary_log_prob(window, masses)
            self.shares.append(1 - (of_vocabulary - score)[0, 0].double().exp())
        self.seconds += device_seconds() - started
        self.processor_seconds += processor_seconds() - processor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return summed losses, and the memories' share [n] of each token if there are any, as a shard's file holds them."""
        losses = {f"losses.{name}": column for name, column in self.sums.tensors().items()}
        return losses | ({"share": torch.cat(self.shares).cpu()} if self.shares else {})


class MeteredMemory:
    """A stand-in for a memory that records ``seconds``, the time of its calls, and its ``peak_bytes``."""

    def __init__(self, memory: Memory):
        self.memory, self.seconds, self.peak_bytes = memory, 0.0, 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.memory, name)
        return partial(self.timed, value) if name in ("prefetch", "mass", "experts", "write") else value

    def request(self, windows: list[Window]) -> Callable[[], list[Any]]:
        """Return ``prefetch`` of these windows, which begins when its result is waited for, so that its time is known."""
        return partial(self.timed, self.memory.prefetch, windows)

    def timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the memory and add its duration to ``seconds``."""
        started = device_seconds()
        result = function(*arguments)
        self.seconds, self.peak_bytes = self.seconds + device_seconds() - started, max(self.peak_bytes, self.memory.bytes)
        return result


class Hits:
    """Counts how often the target token is among those of the K nearest entries."""

    def __init__(self, nearest: KNNMemory):
        self.nearest, self.queries = nearest, 0
        self.hits = {k: 0 for k in TOP if k <= nearest.k}

    def add(self, query: Contexts) -> None:
        """Count the queries of a window."""
        score, token, _ = self.nearest.entries(query)
        order = score.argsort(dim=1, descending=True, stable=True)  # rescoring and hiding change it
        hit: Bool[Tensor, "n k"] = (token == query.token[:, None]) & (score > -math.inf)
        hit = hit.gather(1, order)
        self.queries += len(hit)
        self.hits = {k: count + int(hit[:, :k].any(1).sum()) for k, count in self.hits.items()}

    def accuracy(self) -> dict[str, float]:
        """Return the share of queries whose target was found among K entries, by K."""
        return {str(k): count / max(1, self.queries) for k, count in self.hits.items()}
