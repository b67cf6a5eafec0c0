"""Nearest-neighbour search over keys: the interface, exact search in blocks, and searches over slices of the keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch

from trime.common.types import Float, Int, Tensor
from trime.errors import UserError
from trime.token_memory.search.streaming_topk import StreamingTopK
from trime.token_memory.similarity import normalize_keys, similarity

Blocks = Callable[[], Iterator[Tensor]]  # iterates over all keys, in blocks
RESERVE = 2**32  # bytes of a device kept free for similarities
MIN_POINTS_PER_CELL = 39  # as FAISS recommends
TRAINING_POINTS_PER_CELL = 64  # a quarter of FAISS's default takes a quarter of the time at the same recall here


@runtime_checkable
class Search(Protocol):
    """A search for the keys nearest to queries."""

    kind: str  # "exact" or "approximate"

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Return the similarity and number of the k nearest keys, the best first; (-inf, -1) where fewer are found."""
        ...


class ExactSearch:
    """Search that compares every key, in O(N d) for each query, one block of similarities at a time.

    As many blocks of keys as fit stay on a CUDA device; the others are copied there for each batch of queries.
    """

    kind = "exact"

    def __init__(self, blocks: Blocks, metric: str, rows: int = 2**14):
        self.blocks, self.metric, self.rows = blocks, metric, rows
        self.cached: list[Tensor] = []

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        query, start = query.float(), 0
        if query.device.type == "cpu":
            topk = StreamingTopK(len(query), k)
            for shard in self.blocks():
                for keys in shard.split(self.rows):
                    topk.add(similarity(query, keys.float(), self.metric), start)
                    start += len(keys)
            score, number = topk.result()
            return score, number.long()
        best = query.new_full((len(query), k), -math.inf)
        index = torch.full((len(query), k), -1, dtype=torch.long, device=query.device)
        for shard in self.blocks_on(query.device):
            for keys in shard.split(4 * self.rows):
                top, where = similarity(query, keys.float(), self.metric).topk(min(k, len(keys)), dim=1)
                best, chosen = torch.cat([best, top], 1).topk(k, dim=1)
                index = torch.cat([index, where + start], 1).gather(1, chosen)
                start += len(keys)
        return best, index

    def blocks_on(self, device: torch.device) -> Iterator[Tensor]:
        """Yield all blocks on a device, in the type in which they are stored."""
        for number, keys in enumerate(self.blocks()):
            if number < len(self.cached):
                yield self.cached[number]
                continue
            block = keys.to(device)
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
            if len(self.cached) == number and free > RESERVE:
                self.cached.append(block)
            yield block


def recall_of(exact: Int[Tensor, "n k"], found: Int[Tensor, "n k"]) -> float:
    """Return the share of the exact neighbours that a search found."""
    hits = sum(len({*a} & {*b}) for a, b in zip(exact.tolist(), found.tolist(), strict=True))
    return round(hits / exact.numel(), 4)


class ShardedSearch:
    """A search over all slices of the keys: the K best of the K best of each slice."""

    def __init__(self, searches: list[Search], firsts: list[int]):
        self.searches, self.firsts = searches, firsts
        self.kind = "exact" if {search.kind for search in searches} == {"exact"} else "approximate"

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        return merge_results([search.nearest(query, k) for search in self.searches], self.firsts, k)


def merge_results(
    results: list[tuple[Tensor, Tensor]], firsts: list[int], k: int
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """Return the K best of the K results of each slice; numbers within slice i start at ``firsts[i]`` of the whole."""
    score = torch.stack([score for score, _ in results])
    numbers = zip([number for _, number in results], firsts, strict=True)
    is_divided = any(firsts)  # by rows: numbers of the whole may have more than 32 bits
    number = torch.stack([torch.where(n < 0, n, n.long() + first) if is_divided else n for n, first in numbers])
    best, chosen = score.transpose(0, 1).flatten(1).topk(k, 1)
    return best, number.transpose(0, 1).flatten(1).gather(1, chosen).long()


class CachedSearch:
    """A search that keeps its last result, for when the same queries come twice in a row."""

    def __init__(self, search: Search):
        self.search, self.kind = search, search.kind
        self.last_query: tuple[Tensor, int] | None = None

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        if self.last_query is None or self.last_query[1] != k or not torch.equal(self.last_query[0], query):
            self.last_query, self.last_result = (query, k), self.search.nearest(query, k)
        return self.last_result


def normalized_blocks(blocks: Blocks, metric: str) -> Blocks:
    """Return keys as an index stores them: normalized for the metric cosine."""
    if metric != "cosine":
        return blocks
    return lambda: (normalize_keys(keys.float()).to(keys.dtype) for keys in blocks())


def check_training_size(factory: str, centroids: int, entries: int) -> None:
    """Raise a UserError if there are too few entries to train the centroids."""
    if entries < MIN_POINTS_PER_CELL * centroids:
        needed = MIN_POINTS_PER_CELL * centroids
        raise UserError(
            f"index.factory={factory} needs {needed} entries for {centroids} centroids and has {entries}: "
            "choose index=exact, fewer cells, or raise datastore.tokens"
        )
