"""Measurements of a pass over text: losses of a row with their time, cost and weight of a memory, hits of a search."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from trime.common.metrics import device_seconds, processor_seconds
from trime.common.types import Bool, Contexts, Float, Int, LogMass, Tensor
from trime.scoring.loss_sums import LossSums, TokenMeans
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec
from trime.scoring.mixtures.experts import ExpertMasses
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


def select_memories(
    masses: ExpertMasses, description: dict[str, Any], names: tuple[str, ...]
) -> tuple[ExpertMasses, dict[str, Any]]:
    """Return the masses of the vocabulary and of some memories, and its description."""
    columns, first = [0], 1
    for name, size in description["experts"].items():
        columns += range(first, first + size) if name in names else []
        first += size
    experts = {name: size for name, size in description["experts"].items() if name in names}
    selected = ExpertMasses(masses.target[:, columns].contiguous(), masses.total[:, columns].contiguous(), masses.document)
    return selected, {"experts": experts, "counts": [description["counts"][column] for column in columns]}


@dataclass(frozen=True)
class Bins:
    """Bins of tokens by how well a memory matches: the ``similarity`` of its best entry, or the longest ``context`` of n-grams.

    ``columns``: its experts in the masses; ``edges`` [b - 1]: ascending similarities; ``names`` [b].
    """

    kind: str
    columns: slice
    names: list[str]
    edges: Float[Tensor, " b"]

    def of(self, total: Float[Tensor, "n e"]) -> Int[Tensor, " n"]:
        """Return the bin of each token, -1 where the memory has no match."""
        masses = total[:, self.columns]
        known = masses.isfinite()
        if self.kind == "context":
            return known.sum(1) - 1
        return torch.where(known[:, 0], torch.bucketize(masses[:, 0].contiguous(), self.edges.to(masses)), -1)


def token_weights(
    bins: dict[str, Bins], total: Float[Tensor, "n e"], log_weights: Float[Tensor, "n e"]
) -> tuple[Float[Tensor, "n s"], Int[Tensor, "n m"]]:
    """Return of each token the weights of the vocabulary and of each memory, and its bin for each memory.

    ``total`` and ``log_weights`` are the log-mass and the log-weight of each expert.
    """
    weight = log_weights.exp()
    share = torch.stack([weight[:, 0], *(weight[:, each.columns].sum(1) for each in bins.values())], 1)
    return share, torch.stack([each.of(total) for each in bins.values()], 1)


class WeightSums:
    """Sums the weights over the tokens of a text."""

    def __init__(self, bins: dict[str, Bins], vocabulary: int):
        self.bins = bins
        self.largest = torch.zeros(1 + len(bins), dtype=torch.long)
        self.by_token = [TokenMeans(vocabulary) for _ in self.largest]
        self.by_bin = {name: TokenMeans(len(memory_bins.names)) for name, memory_bins in bins.items()}

    def add(self, token: Int[Tensor, " n"], share: Float[Tensor, "n s"], number: Int[Tensor, "n m"]) -> None:
        """Add tokens with the result of ``token_weights``."""
        self.largest += share.argmax(1).bincount(minlength=share.shape[1])
        for table, column in zip(self.by_token, share.unbind(1), strict=True):
            table.add(token, column)
        for table, column, bins in zip(self.by_bin.values(), share[:, 1:].unbind(1), number.unbind(1), strict=True):
            # -1: the memory knew nothing of the token.
            known = bins >= 0
            table.add(bins[known], column[known])

    def summary(self, frequency: np.ndarray) -> dict[str, Any]:
        """Return, for the vocabulary and each memory, the share of tokens where its weight is largest, and mean weights."""
        result: dict[str, Any] = {}
        for name, largest, table in zip(["vocabulary", *self.bins], self.largest.tolist(), self.by_token, strict=True):
            result[name] = {"largest": largest / max(1, table.tokens), "by_frequency": table.buckets(frequency)}
        for name, bins in self.bins.items():
            masks = np.eye(len(bins.names), dtype=bool)
            cells = [{"bucket": bucket, **self.by_bin[name].mean(mask)} for bucket, mask in zip(bins.names, masks, strict=True)]
            result[name] |= {f"by_{bins.kind}": cells}
        return result
