"""Nearest neighbours among the keys of a segment: exact where they are few or FAISS is not installed, else by FAISS.

Keys are contexts of a decoder whose dimensions have mean 0 and deviation 1 over its memory, scaled to length 1: similarity is
their cosine. Dimensions of a decoder's contexts differ by orders of magnitude; without this a few of them decide.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from trime.common.types import Float, Int, Tensor
from trime.errors import UserError, install_command

log = logging.getLogger(__name__)

INDEX = "index.faiss"
EXACT = 2**15  # keys up to which all are compared: that takes a millisecond
MOST = 2**19  # keys of which all are compared where there is no FAISS: a tenth of a second, and gigabytes
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
        else:
            self.exact = torch.from_numpy(np.array(key)).float()

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
            score = query @ self.exact.T
            score[:, torch.from_numpy(self.first)] = -torch.inf
            score[:, slice(*hidden)] = -torch.inf
            place = steady_topk(score, k)
            return score.gather(1, place), place
        import faiss

        seen = faiss.IDSelectorNot(faiss.IDSelectorRange(*hidden)) if hidden[1] else None
        settings = faiss.SearchParametersIVF(sel=seen, nprobe=VISITED)  # type: ignore[call-arg]
        score, place = (torch.from_numpy(array) for array in self.index.search(query.numpy(), k, params=settings))
        return score.masked_fill(place < 0, -torch.inf), place.clamp(min=0)


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
