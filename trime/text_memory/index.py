"""Nearest neighbours among the keys of a segment: exact where they are few or FAISS is not installed, else by FAISS.

Keys are contexts of a decoder whose dimensions have mean 0 and deviation 1 over its memory, scaled to length 1: similarity is
their cosine. Dimensions of a decoder's contexts differ by orders of magnitude; without this a few of them decide.
"""

from __future__ import annotations

import logging
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from trime.common.types import Float, Int, Tensor
from trime.errors import UserError, install_command
from trime.text_memory import index_cpu

log = logging.getLogger(__name__)

INDEX = "index.faiss"
EXACT = 2**16  # keys up to which all are compared: that takes a millisecond
MOST = 2**19  # keys of which all are compared where there is no FAISS: some ten milliseconds a query
FEW = 8  # queries of which each is compared by itself, with keys as bytes
BLOCK = 2**14  # keys that more queries are compared with at once
PER_CELL = 512  # keys of a cell
TRAINED_ON = 64  # keys per cell
VISITED = 32  # cells that a query visits
SEED = 1234
EQUAL = 2.0**-15  # difference of cosines that are taken for equal
LEAST = -4.0  # less than any cosine, with what keys of half precision and bytes add to it


class KeyIndex:
    """Search of a segment's keys. ``first``: the first token of each document, which has no context."""

    def __init__(self, folder: Path, key: np.ndarray, first: np.ndarray):
        self.key, self.first = key, first
        self.index = None
        if (folder / INDEX).exists() and has_faiss(len(key)):
            import faiss

            try:
                self.index = faiss.read_index(str(folder / INDEX), faiss.IO_FLAG_MMAP_IFC)
            except RuntimeError:
                raise UserError(f"{folder / INDEX} is damaged: delete the memory's folder, and add its texts again") from None

    @cached_property
    def as_bytes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All keys as bytes [n d], the scale of each, and the sum of its magnitudes."""
        row, (scale, size) = np.empty(self.key.shape, np.int8), np.empty((2, len(self.key)), np.float32)
        for first in range(0, len(row), BLOCK):
            some = slice(first, first + BLOCK)
            index_cpu.quantize(self.key[some].astype(np.float32), row[some], scale[some], size[some])
        return row, scale, size

    @staticmethod
    def build(folder: Path, key: np.ndarray, first: np.ndarray) -> None:
        """Write the index of a segment's keys, if they are so many that not all should be compared."""
        if len(key) <= EXACT or not has_faiss(len(key)):
            return
        import faiss

        cells = len(key) // PER_CELL
        log.info("index: training %s cells for %s keys", f"{cells:,}", f"{len(key):,}")
        index = faiss.index_factory(key.shape[1], f"IVF{cells},SQ8", faiss.METRIC_INNER_PRODUCT)
        clustering = faiss.extract_index_ivf(index).cp
        clustering.seed, clustering.max_points_per_centroid = SEED, TRAINED_ON
        has_key = np.ones(len(key), bool)
        has_key[first] = False
        number = np.flatnonzero(has_key)
        sample = np.sort(np.random.default_rng(SEED).permutation(number)[: TRAINED_ON * cells])
        index.train(key[sample].astype(np.float32))
        for some in np.array_split(number, max(1, len(number) // 2**16)):
            index.add_with_ids(key[some].astype(np.float32), some)
        faiss.write_index(index, str(folder / INDEX))

    def search(
        self, query: Float[Tensor, "n d"], k: int, hidden: tuple[int, int]
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Return the similarities of the nearest keys by FAISS, and their places; -inf and 0 where there are fewer."""
        import faiss

        seen = faiss.IDSelectorNot(faiss.IDSelectorRange(*hidden)) if hidden[1] else None
        settings = faiss.SearchParametersIVF(sel=seen, nprobe=VISITED)  # type: ignore[call-arg]
        assert self.index is not None
        score, place = (torch.from_numpy(array) for array in self.index.search(query.numpy(), k, params=settings))
        return score.masked_fill(place < 0, -torch.inf), place.clamp(min=0)

    def compare(self, query: Float[Tensor, "n d"], hidden: tuple[int, int]) -> Float[Tensor, "n m"]:
        """Return the similarities of all keys; -inf of those that are left out."""
        blocks = [self.key[first : first + BLOCK].astype(np.float32) for first in range(0, len(self.key), BLOCK)]
        score = torch.cat([query @ torch.from_numpy(block).T for block in blocks], 1)
        score[:, torch.from_numpy(self.first)] = -torch.inf
        score[:, slice(*hidden)] = -torch.inf
        return score

    def bounds(self, query: np.ndarray, hidden: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return bounds [m] of the similarities of all keys, from below and above; -inf for those that are left out.

        With q = s Q + e, where |e| <= s / 2 in each dimension, and k alike, q k differs from s s' Q K by no more than
        s' |q| / 2 + s |s' K| / 2, where |.| sums magnitudes.
        """
        size = np.abs(query)
        step = max(size.max(), np.float32(1e-12)) / np.float32(index_cpu.LEVELS)
        low, high = np.empty((2, len(self.key)), np.float32)
        index_cpu.bounds(*self.as_bytes, np.round(query / step).astype(np.int8), step, size.sum(), low, high)
        for bound in (low, high):
            bound[self.first] = bound[slice(*hidden)] = -np.inf
        return low, high


def nearest(
    indices: list[KeyIndex], query: Float[Tensor, "n d"], k: int, hidden: list[tuple[int, int]]
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"], Int[Tensor, "n k"]]:
    """Return the similarities of the nearest keys of all indices, the number of the index of each, and its place there.

    Of each index the keys from the first of ``hidden`` to before the last are left out. Where there are fewer than ``k`` keys,
    there are fewer columns, or similarities of -inf.
    """
    found = []
    for at, (index, own) in enumerate(zip(indices, hidden, strict=True)):
        if index.index is not None:
            score, place = index.search(query, k, own)
            found.append((score, torch.full_like(place, at), place))
    if len(found) < len(indices):
        groups = query.split(1) if len(query) <= FEW else [query]
        of_groups = [compared(indices, group, k, hidden) for group in groups]
        score, number, place = (torch.cat(column) for column in zip(*of_groups, strict=True))
        found.append((score, number, place))
    if len(found) == 1:
        return found[0]
    score, number, place = (torch.cat(column, 1) for column in zip(*found, strict=True))
    best = steady_topk(score, k)
    return score.gather(1, best), number.gather(1, best), place.gather(1, best)


def compared(
    indices: list[KeyIndex], query: Float[Tensor, "n d"], k: int, hidden: list[tuple[int, int]]
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"], Int[Tensor, "n k"]]:
    """As ``nearest``, of the indices that FAISS has not: a single query meets only keys that can be among its nearest."""
    numbers = [number for number, index in enumerate(indices) if index.index is None]
    own = [(indices[number], hidden[number]) for number in numbers]
    if len(query) == 1:
        chosen = candidates(own, query[0].numpy(), k)
        key = np.concatenate([index.key[places] for (index, _), places in zip(own, chosen, strict=True)])
        score = query @ torch.from_numpy(key.astype(np.float32)).T
    else:
        chosen = [np.arange(len(index.key)) for index, _ in own]
        score = torch.cat([index.compare(query, left_out) for index, left_out in own], 1)
    number = torch.from_numpy(np.repeat(numbers, [len(places) for places in chosen]))
    best = steady_topk(score, k)
    return score.gather(1, best), number[best], torch.from_numpy(np.concatenate(chosen))[best]


def candidates(indices: list[tuple[KeyIndex, tuple[int, int]]], query: np.ndarray, k: int) -> list[np.ndarray]:
    """Return for each index, with what is left out of it, the places of all keys that can be among the ``k`` nearest."""
    bounds = [index.bounds(query, left_out) for index, left_out in indices]
    low = np.concatenate([low for low, _ in bounds])
    k = min(k, len(low))
    least = max(np.partition(low, -k)[-k] - EQUAL, LEAST)
    return [np.flatnonzero(high >= least) for _, high in bounds]


def has_faiss(keys: int) -> bool:
    """Return whether FAISS is installed; UserError where it is not, and there are too many keys to do without it."""
    if find_spec("faiss"):
        return True
    if keys > MOST:
        raise UserError(f"{keys:,} keys are too many to compare all of them: {install_command('cpu')}")
    return False


def steady_topk(score: Float[Tensor, "n m"], k: int) -> Int[Tensor, "n k"]:
    """Return the columns of the best scores, and of equal ones the first: texts repeat themselves, contexts with them.

    Scores are cosines, and equal if they differ by less than a rounding error of the model.
    """
    order = torch.arange(score.shape[1], device=score.device)
    rank = (score.clamp(min=LEAST) / EQUAL).round().long() * 2**31 - order
    return rank.topk(min(k, score.shape[1]), 1).indices
