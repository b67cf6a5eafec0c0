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

    def nearest(
        self, query: Float[Tensor, "n d"], k: int, hidden: tuple[int, int] = (0, 0)
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Return the similarities of the nearest keys, and their places; -inf and 0 where there are fewer.

        Keys from the first of ``hidden`` to before the last are left out.
        """
        if self.index is None:
            groups = query.split(1) if len(query) <= FEW else [query]
            found = [self.nearest_of_all(group, k, hidden) for group in groups]
            score, place = (torch.cat(column) for column in zip(*found, strict=True))
            return score, place
        import faiss

        seen = faiss.IDSelectorNot(faiss.IDSelectorRange(*hidden)) if hidden[1] else None
        settings = faiss.SearchParametersIVF(sel=seen, nprobe=VISITED)  # type: ignore[call-arg]
        score, place = (torch.from_numpy(array) for array in self.index.search(query.numpy(), k, params=settings))
        return score.masked_fill(place < 0, -torch.inf), place.clamp(min=0)

    def nearest_of_all(
        self, query: Float[Tensor, "n d"], k: int, hidden: tuple[int, int]
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Compare with all keys: a single query with those alone that can be among its nearest."""
        if len(query) == 1:
            chosen = self.candidates(query[0].numpy(), min(k, len(self.key)), hidden)
            score, place = query @ torch.from_numpy(self.key[chosen].astype(np.float32)).T, torch.from_numpy(chosen)[None]
        else:
            blocks = [self.key[first : first + BLOCK].astype(np.float32) for first in range(0, len(self.key), BLOCK)]
            score = torch.cat([query @ torch.from_numpy(block).T for block in blocks], 1)
            score[:, torch.from_numpy(self.first)] = -torch.inf
            score[:, slice(*hidden)] = -torch.inf
            place = torch.arange(score.shape[1])[None]
        best = steady_topk(score, k)
        return score.gather(1, best), place.expand_as(score).gather(1, best)

    def candidates(self, query: np.ndarray, k: int, hidden: tuple[int, int]) -> np.ndarray:
        """Return the places of all keys that can be among the ``k`` nearest of a query, in order.

        With q = s Q + e, where |e| <= s / 2 in each dimension, and k alike, q k differs from s s' Q K by no more than
        s' |q| / 2 + s |s' K| / 2, where |.| sums magnitudes.
        """
        row, scale, size = self.as_bytes
        step, product = max(float(np.abs(query).max()), 1e-12) / index_cpu.LEVELS, np.empty(len(row), np.int32)
        index_cpu.products(row, np.round(query / step).astype(np.int8), product)
        cosine, bound = product * (scale * np.float32(step)), (np.abs(query).sum() * scale + step * size) / 2
        seen = np.ones(len(row), bool)
        seen[self.first] = seen[slice(*hidden)] = False
        k = min(k, int(seen.sum()))
        least = np.partition(np.where(seen, cosine - bound, -np.inf), -k)[-k] if k else np.inf
        return np.flatnonzero(seen & (cosine + bound >= least - EQUAL))


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
    rank = (score.clamp(min=-4) / EQUAL).round().long() * 2**31 - order
    return rank.topk(min(k, score.shape[1]), 1).indices
