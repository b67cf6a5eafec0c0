"""Search by a FAISS index, which a factory string describes: trained on a sample of keys, filled in resumable steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trime.common.io import replacing
from trime.common.types import Float, Int, Tensor
from trime.errors import UserError, install_command
from trime.token_memory.search.datastore import Keys
from trime.token_memory.search.search import TRAINING_POINTS_PER_CELL, check_training_size, normalized_blocks
from trime.token_memory.similarity import normalize_keys

SAVED_EVERY = 2**24  # keys between two saves of an unfinished index, from which a killed build resumes


def use_threads(count: int) -> None:
    """Set the number of threads of this process for PyTorch and FAISS."""
    import faiss

    torch.set_num_threads(count)
    faiss.omp_set_num_threads(count)


class FaissSearch:
    """A FAISS index read from a file; UserError if the file is damaged.

    ``nprobe`` cells of an inverted index are searched. Other devices than the CPU need faiss-gpu.
    """

    def __init__(self, file: Path, metric: str, nprobe: int, device: str = "cpu"):
        import faiss

        try:
            self.index = faiss.read_index(str(file))
        except RuntimeError:
            raise UserError(f"{file} is truncated or not a FAISS index: delete its folder and run stage index") from None
        self.metric = metric
        self.kind = "exact" if isinstance(self.index, faiss.IndexFlat) else "approximate"
        inverted = faiss.try_extract_index_ivf(self.index)  # behind a PCA too
        if inverted is not None:
            inverted.nprobe = nprobe
        if device != "cpu":
            if not getattr(faiss, "get_num_gpus", lambda: 0)():  # faiss-cpu has no such function
                remedy = f"{install_command('gpu')}, or index.device=cpu"
                raise UserError(f"index.device=cuda needs a CUDA device and faiss-gpu: {remedy}")
            self.index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, self.index)

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        normalized = normalize_keys(query.float()) if self.metric == "cosine" else query.float()
        distance, number = map(torch.from_numpy, self.index.search(normalized.cpu().numpy(), k))
        score = -distance if self.metric == "l2" else distance
        return score.masked_fill(number < 0, -math.inf).to(query.device), number.to(query.device)


class FaissBuilder:
    """An index of FAISS by its factory string, with underscores for commas."""

    def __init__(self, factory: str):
        self.factory = factory

    def check(self, entries: int, width: int, metric: str) -> None:
        create_index(entries, width, self.factory, metric)

    def train(self, keys: Keys, metric: str, folder: Path) -> Path:
        """Write an empty index, trained on an even sample of the keys."""
        import faiss

        file = folder / "learned.faiss"
        if file.exists():
            return file
        index = create_index(len(keys), keys.width, self.factory, metric)
        if not index.is_trained:
            inverted = faiss.try_extract_index_ivf(index)
            if inverted is not None:
                inverted.cp.max_points_per_centroid = TRAINING_POINTS_PER_CELL
            step = max(1, len(keys) // (max(centroid_count(index), 1024) * TRAINING_POINTS_PER_CELL))
            sample = torch.cat([block[::step].float() for block in normalized_blocks(keys.blocks, metric)()]).numpy()
            with faiss_errors():
                if metric != "l2" and isinstance(index, faiss.IndexPreTransform):
                    transform = faiss.downcast_VectorTransform(index.chain.at(0))  # type: ignore[attr-defined]
                    if isinstance(transform, faiss.PCAMatrix):
                        # PCA subtracts the mean, which would change inner products. That of keys and their negatives is 0,
                        # and their covariance is the second moment of the keys.
                        transform.train(np.concatenate([sample, -sample]))
                index.train(sample)
        save_index(index, file)
        return file

    def fill(self, keys: Keys, metric: str, trained: Path, folder: Path, bar: Any) -> None:
        """Fill a copy of the empty index; a killed run resumes after the keys that the file has already."""
        import faiss

        file = folder / "index.faiss"
        index = faiss.read_index(str(file if file.exists() else trained))
        bar.update(index.ntotal)
        saved, passed = index.ntotal, 0
        for block in normalized_blocks(keys.blocks, metric)():
            fresh = block[max(0, index.ntotal - passed) :]
            passed += len(block)
            if len(fresh):
                with faiss_errors():
                    index.add(fresh.float().numpy())
                bar.update(len(fresh))
            if index.ntotal - saved >= SAVED_EVERY:
                save_index(index, file)
                saved = index.ntotal
        if index.ntotal > saved or not file.exists():
            save_index(index, file)

    def open(self, folder: Path, metric: str, nprobe: int, device: str) -> FaissSearch:
        return FaissSearch(folder / "index.faiss", metric, nprobe, device)


def create_index(entries: int, width: int, factory: str, metric: str) -> Any:
    """Return the untrained index of a factory string; UserError if the string is invalid or the entries are too few."""
    import faiss

    kind = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    try:
        index = faiss.index_factory(width, re.sub(r"(IVF\d+),HNSW", r"\1_HNSW", factory.replace("_", ",")), kind)
    except RuntimeError:
        raise UserError(f"index.factory={factory} is not a FAISS factory string for width {width}: try IVF_SQ8") from None
    if any(int(size) > width for size in re.findall(r"PCA\w*?(\d+)", factory)):
        raise UserError(f"index.factory={factory}: keys have {width} dimensions, and PCA cannot keep more")
    if not index.is_trained:
        check_training_size(factory, centroid_count(index), entries)
    return index


@contextmanager
def faiss_errors() -> Iterator[None]:
    """Turn errors of FAISS about a valid but unsupported factory string into a UserError."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(f"index.factory: FAISS cannot build it ({str(error).splitlines()[0][-160:]}): try IVF_SQ8") from None


def centroid_count(index: Any) -> int:
    """Return the number of cells of an inverted index; otherwise 256, the centroids of an 8-bit code."""
    import faiss

    inverted = faiss.try_extract_index_ivf(index)
    return inverted.nlist if inverted is not None else 256


def save_index(index: Any, file: Path) -> None:
    """Write an index atomically."""
    import faiss

    with replacing(file) as partial:
        faiss.write_index(index, str(partial))
