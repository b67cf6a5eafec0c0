"""Search by a FAISS index that a factory string names: trained on a sample of keys, filled in steps, read from a file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trime.memory.retrieval.search import Blocks, check_training_size, normalized_blocks
from trime.memory.similarity import normalize_keys
from trime.types import Float, Int, Tensor, UserError

SAVED_EVERY = 2**24  # keys: a killed build of an index goes on from the last of these
TRAINING_POINTS = 64  # per centroid: a quarter of FAISS's default costs no recall here and a quarter of the time


def use_threads(count: int) -> None:
    """So many of this process, for PyTorch and FAISS."""
    import faiss

    torch.set_num_threads(count)
    faiss.omp_set_num_threads(count)


class FaissSearch:
    """A FAISS index read from a file; ``nprobe`` cells of an inverted index are visited. On a CUDA device by faiss-gpu."""

    def __init__(self, file: Path, metric: str, nprobe: int, device: str = "cpu"):
        import faiss

        try:
            self.index = faiss.read_index(str(file))
        except RuntimeError:
            raise UserError(f"{file} is truncated or no FAISS index: delete its folder and run stage datastore") from None
        self.metric = metric
        self.kind = "exact" if isinstance(self.index, faiss.IndexFlat) else "approximate"
        inverted = faiss.try_extract_index_ivf(self.index)  # behind a PCA too
        if inverted is not None:
            inverted.nprobe = nprobe
        if device != "cpu":
            self.index = to_cuda(self.index)

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        asked = normalize_keys(query.float()) if self.metric == "cosine" else query.float()
        found, index = self.index.search(asked.cpu().numpy(), k)
        score = -torch.from_numpy(found) if self.metric == "l2" else torch.from_numpy(found)
        index_ = torch.from_numpy(index)
        return score.masked_fill(index_ < 0, -math.inf).to(query.device), index_.to(query.device)


def to_cuda(index: Any) -> Any:
    """An index on the first CUDA device."""
    import faiss

    if not getattr(faiss, "get_num_gpus", lambda: 0)():
        raise UserError("index.device=cuda needs a CUDA device and faiss-gpu: pip install 'trime[gpu]', or index.device=cpu")
    return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index)


def train_faiss(blocks: Blocks, entries: int, width: int, factory: str, metric: str, file: Path) -> None:
    """An empty index, trained on a sample of keys. An underscore in ``factory`` stands for a comma."""
    if not file.exists():
        save_index(train_index(normalized_blocks(blocks, metric), entries, width, factory, metric), file)


def fill_faiss(blocks: Blocks, metric: str, learned: Path, file: Path, bar: Any) -> None:
    """Fills a copy of the empty index; a killed run goes on from the keys that ``file`` holds."""
    import faiss

    blocks = normalized_blocks(blocks, metric)
    index = faiss.read_index(str(file if file.exists() else learned))
    bar.update(index.ntotal)
    saved, passed = index.ntotal, 0
    for keys in blocks():
        fresh = keys[max(0, index.ntotal - passed) :]
        passed += len(keys)
        if len(fresh):
            with faiss_errors():
                index.add(fresh.float().numpy())
            bar.update(len(fresh))
        if index.ntotal - saved >= SAVED_EVERY:
            save_index(index, file)
            saved = index.ntotal
    if index.ntotal > saved or not file.exists():
        save_index(index, file)


def train_index(blocks: Blocks, entries: int, width: int, factory: str, metric: str) -> Any:
    """An empty index that is ready to be filled."""
    index = create_index(entries, width, factory, metric)
    if not index.is_trained:
        with faiss_errors():
            index.train(training_sample(blocks, entries, index).numpy())
    return index


def create_index(entries: int, width: int, factory: str, metric: str) -> Any:
    """What a factory string names, not trained; UserError where it names nothing, or entries are too few to train it."""
    import faiss

    kind = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    try:
        index = faiss.index_factory(width, re.sub(r"(IVF\d+),HNSW", r"\1_HNSW", factory.replace("_", ",")), kind)
    except RuntimeError:
        raise UserError(f"index.factory={factory} is no FAISS factory string for width {width}: try IVF_SQ8") from None
    if any(int(kept) > width for kept in re.findall(r"PCA\w*?(\d+)", factory)):
        raise UserError(f"index.factory={factory}: keys have {width} dimensions, of which PCA can keep no more")
    if not index.is_trained:
        check_training_size(factory, centroid_count(index), entries)
    return index


@contextmanager
def faiss_errors() -> Iterator[None]:
    """A factory string that FAISS understands may still be one that it cannot make."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(f"index.factory: FAISS refuses it ({str(error).splitlines()[0][-160:]}): try IVF_SQ8") from None


def centroid_count(index: Any) -> int:
    """Of an inverted index; else as many centroids as a code of 8 bits has."""
    import faiss

    inverted = faiss.try_extract_index_ivf(index)
    return inverted.nlist if inverted is not None else 256


def save_index(index: Any, file: Path) -> None:
    """Writes an index whole or not at all."""
    import faiss

    partial = file.with_name(file.name + ".partial")
    faiss.write_index(index, str(partial))
    partial.replace(file)


def training_sample(blocks: Blocks, entries: int, index: Any) -> Float[Tensor, "n d"]:
    """An even sample of keys, as many as the index's cells want."""
    import faiss

    inverted = faiss.try_extract_index_ivf(index)
    if inverted is not None:
        inverted.cp.max_points_per_centroid = TRAINING_POINTS
    step = max(1, entries // (max(centroid_count(index), 1024) * TRAINING_POINTS))
    return torch.cat([keys[::step].float() for keys in blocks()])
