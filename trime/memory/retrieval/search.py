"""Nearest-neighbour search over keys: what every search answers, exact search in blocks by PyTorch, and searches joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch

from trime.memory.retrieval.streaming_topk import StreamingTopK
from trime.memory.similarity import normalize_keys, similarity
from trime.types import Float, Int, Tensor, UserError

Blocks = Callable[[], Iterator[Tensor]]  # all keys, in blocks
RESERVE = 2**32  # bytes of a device that are left free for similarities
MIN_POINTS_PER_CELL = 39  # entries of a cell, as FAISS wants


@runtime_checkable
class Search(Protocol):
    kind: str  # "exact" or "approximate"

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Similarity and number of the k nearest keys, the best first; (-inf, -1) where fewer are found."""
        ...


class ExactSearch:
    """Every key is compared: O(N d) a query, one block of similarities at a time.

    On a CUDA device as many blocks of keys as fit stay there; the others are sent for every batch of queries.
    """

    kind = "exact"

    def __init__(self, blocks: Blocks, metric: str, rows: int = 2**14):
        self.blocks, self.metric, self.rows = blocks, metric, rows
        self.held: list[Tensor] = []

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        return (self.on_cpu if query.device.type == "cpu" else self.on_device)(query.float(), k)

    def on_cpu(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        topk, start = StreamingTopK(len(query), k), 0
        for shard in self.blocks():
            for keys in shard.split(self.rows):
                topk.add(similarity(query, keys.float(), self.metric), start)
                start += len(keys)
        return topk.result()

    def on_device(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        best = query.new_full((len(query), k), -math.inf)
        index = torch.full((len(query), k), -1, dtype=torch.long, device=query.device)
        start = 0
        for shard in self.on(query.device):
            for keys in shard.split(4 * self.rows):
                scores = similarity(query, keys.float(), self.metric)
                top, where = scores.topk(min(k, len(keys)), dim=1)
                best, chosen = torch.cat([best, top], 1).topk(k, dim=1)
                index = torch.cat([index, where + start], 1).gather(1, chosen)
                start += len(keys)
        return best, index

    def on(self, device: torch.device) -> Iterator[Tensor]:
        """All blocks on a device, in the type in which they are stored."""
        for number, keys in enumerate(self.blocks()):
            if number < len(self.held):
                yield self.held[number]
                continue
            there = keys.to(device)
            if len(self.held) == number and free_bytes(device) > RESERVE:
                self.held.append(there)
            yield there


def recall_of(exact: Int[Tensor, "n k"], found: Int[Tensor, "n k"]) -> float:
    """The share of the exact neighbours that a search found."""
    hits = sum(len({*a} & {*b}) for a, b in zip(exact.tolist(), found.tolist(), strict=True))
    return round(hits / exact.numel(), 4)


def free_bytes(device: torch.device) -> int:
    """Bytes that a device has left."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


class ShardedSearch:
    """Searches over parts of the keys, answered as one: the K best of each part's K best."""

    def __init__(self, searches: list[Search], firsts: list[int]):
        self.searches, self.firsts = searches, firsts
        self.kind = combined_kind([search.kind for search in searches])

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        return merge_results([search.nearest(query, k) for search in self.searches], self.firsts, k)


def merge_results(
    found: list[tuple[Tensor, Tensor]], firsts: list[int], k: int
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The K best of what parts found, whose entries are numbered from ``firsts`` on."""
    scores = torch.cat([score for score, _ in found], 1)
    numbers = torch.cat([torch.where(own < 0, own, own + first) for (_, own), first in zip(found, firsts, strict=True)], 1)
    best, chosen = scores.topk(k, 1)
    return best, numbers.gather(1, chosen)


def combined_kind(kinds: list[str]) -> str:
    """Exact where all parts are."""
    return "exact" if {*kinds} == {"exact"} else "approximate"


class CachedSearch:
    """Another search, which is asked but once where the same queries come twice in a row."""

    def __init__(self, search: Search):
        self.search, self.kind = search, search.kind
        self.asked: tuple[Tensor, int] | None = None

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        if self.asked is None or self.asked[1] != k or not torch.equal(self.asked[0], query):
            self.asked, self.found = (query, k), self.search.nearest(query, k)
        return self.found


def normalized_blocks(blocks: Blocks, metric: str) -> Blocks:
    """All keys as an index holds them: for cosine at one length."""
    if metric != "cosine":
        return blocks
    return lambda: (normalize_keys(keys.float()).to(keys.dtype) for keys in blocks())


def check_training_size(factory: str, centroids: int, entries: int) -> None:
    """UserError where so many centroids could not be learned from the entries."""
    if entries < MIN_POINTS_PER_CELL * centroids:
        needed = MIN_POINTS_PER_CELL * centroids
        raise UserError(
            f"index.factory={factory} needs {needed} entries for {centroids} centroids and has {entries}: "
            "choose index=exact, fewer cells, or raise datastore.tokens"
        )
