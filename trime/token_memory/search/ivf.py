"""Search by an inverted file, for batches of queries: each cell is multiplied with all queries that visit it at once.

Keys are sorted by cell and keep the type in which they were encoded, so that similarities are exact, and approximate is only
which keys are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from trime.common.io import new_array, write_array, write_tensors
from trime.common.types import Float, Int, Tensor
from trime.errors import UserError
from trime.token_memory.search.datastore import Keys
from trime.token_memory.search.search import Blocks, check_training_size, normalized_blocks
from trime.token_memory.search.streaming_topk import StreamingTopK
from trime.token_memory.similarity import normalize_keys, similarity

CELLS, KEYS = "cells.safetensors", "key.npy"  # files of an index: where each cell begins, and the keys
CENTROIDS = "learned.npy"  # in the folder of an index that is being built
SCORES = 2**24  # in memory at a time, approximately: 64 MiB
SIMILARITIES = 2**25  # of keys and centroids in memory at a time: 128 MiB
SAMPLE, STEPS = 64, 10  # training keys per cell; rounds of k-means


@contextmanager
def opened_cells(folder: Path) -> Iterator[Any]:
    """Open the description of an index; UserError if it, or a file that is read meanwhile, is damaged."""
    try:
        with safe_open(folder / CELLS, "pt") as tensors:
            yield tensors
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{folder} is truncated or not an index ({error}): delete it and run stage index") from None


class Cells:
    """The centroids of an index, and where the keys of each cell begin; UserError if the folder's files are damaged."""

    def __init__(self, folder: Path, metric: str, nprobe: int):
        self.metric = metric
        with opened_cells(folder) as tensors:
            self.centroid, self.start = tensors.get_tensor("centroid"), tensors.get_tensor("start").numpy()
        self.nprobe = min(nprobe, len(self.centroid))

    def visited(self, query: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n d"], Int[Tensor, "n p"]]:
        """Return queries as they are compared, and the ``nprobe`` cells with the centroids nearest to each."""
        local = query.float().cpu()
        local = normalize_keys(local) if self.metric == "cosine" else local
        return local, similarity(local, self.centroid, self.metric).topk(self.nprobe, 1).indices


class IVFSearch:
    """Search of the ``nprobe`` cells with the nearest centroids, or of those in ``span``; UserError if files are damaged.

    ``span``: the first cell, and the one after the last.
    """

    kind = "approximate"

    def __init__(self, folder: Path, metric: str, nprobe: int, span: tuple[int, int] | None = None):
        self.metric, self.cells = metric, Cells(folder, metric, nprobe)
        self.start = self.cells.start
        self.span = span or (0, len(self.start) - 1)
        first, last = (int(self.start[cell]) for cell in self.span)
        if last - first >= 2**31:
            raise UserError(
                f"{last - first:,} entries in one part of an index, more than 2^31: set index.engine=ray and index.parts"
            )
        self.slot = self.start - first  # of each cell's first key in this span
        with opened_cells(folder) as tensors:
            number = tensors.get_slice("number")[first:last]
            self.key = torch.from_numpy(np.load(folder / KEYS, mmap_mode="c"))
        number = number.int() if self.start[-1] < 2**31 else number  # half the memory to read
        self.number = torch.cat([number, number.new_full((1,), -1)])  # the last one is that of a missing key
        self.topk, self.flat = StreamingTopK(1, 1), torch.empty(0)

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        score, number = self.nearest_in(*self.cells.visited(query), k)
        return score.to(query.device), number.long().to(query.device)

    def nearest_in(
        self, local: Float[Tensor, "n d"], visited: Int[Tensor, "n p"], k: int
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Return the nearest keys in the visited cells of this span, for queries as ``Cells.visited`` returns them.

        Numbers have 32 bits where they fit; the nearest come first.
        """
        flat = visited.flatten()
        order = flat.argsort(stable=True)  # pairs of query and cell, sorted by cell
        low, high = torch.searchsorted(flat[order], torch.tensor(self.span)).tolist()
        order = order[low:high]
        cell, row = flat[order], order // visited.shape[1]
        if (self.topk.k, len(self.topk.count)) != (k, len(local)):
            self.topk = StreamingTopK(len(local), k)
        self.topk.reset()
        sizes = torch.from_numpy(np.diff(self.start))[cell]
        batch = (sizes.cumsum(0) - sizes) // SCORES
        for pairs in torch.split(torch.arange(len(order)), batch.unique_consecutive(return_counts=True)[1].tolist()):
            self.score_pairs(local, cell[pairs], row[pairs])
        score, slot = self.topk.result()
        slot = slot.masked_fill_(slot < 0, len(self.number) - 1)
        number = self.number.index_select(0, slot.flatten()).view(slot.shape)
        if self.metric == "l2":
            score -= local.square().sum(1, keepdim=True)
        return score, number

    def score_pairs(self, query: Tensor, cell: Tensor, row: Tensor) -> None:
        """Compare the queries and cells of some pairs, each cell with all queries that visit it."""
        numbers, counts = (column.tolist() for column in cell.unique_consecutive(return_counts=True))
        blocks, offset, first, done = [], torch.empty_like(cell), 0, 0
        for number, count in zip(numbers, counts, strict=True):
            rows, columns = round_up(count, 8), round_up(int(self.start[number + 1] - self.start[number]), 64)
            columns = min(columns, len(self.key) - int(self.start[number]))  # may reach into the next cell: not read
            blocks.append((done, rows, columns))
            offset[first : first + count] = done + columns * torch.arange(count)
            first, done = first + count, done + rows * columns
        if len(self.flat) < done:
            self.flat = torch.empty(done)
        first = 0
        for number, count, (begin, rows, columns) in zip(numbers, counts, blocks, strict=True):
            queries = query[row[torch.arange(first, first + rows).clamp(max=first + count - 1)]]
            keys = self.key[self.start[number] : self.start[number] + columns].float()
            out = self.flat[begin : begin + rows * columns].view(rows, columns)
            if self.metric == "l2":  # without |query|^2, which is the same for all keys
                torch.addmm(keys.square().sum(1)[None], queries, keys.T, beta=-1, alpha=2, out=out)
            else:
                torch.mm(queries, keys.T, out=out)
            first += count
        order = row.argsort(stable=True)
        edges = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(row, minlength=len(query)).cumsum(0)])
        self.topk.add_tiles(self.flat, edges, offset[order], cell[order], self.slot)


def round_up(size: int, step: int) -> int:
    """Round a size up by at most an eighth, so that there are few shapes: oneDNN compiles a program for each."""
    step = max(step, 2 ** ((size - 1).bit_length() - 3)) if size > 1 else step
    return -(-size // step) * step


class IVFBuilder:
    """Keys sorted by cell (``Cells…``)."""

    def __init__(self, cells: int):
        self.cells = cells

    def check(self, entries: int, width: int, metric: str) -> None:
        check_training_size(f"Cells{self.cells}", self.cells, entries)

    def train(self, keys: Keys, metric: str, folder: Path) -> Path:
        """Write centroids by FAISS's k-means on an even sample of keys; of length 1 for inner products and cosine."""
        import faiss

        file = folder / CENTROIDS
        if not file.exists():
            step, spherical = max(1, len(keys) // (self.cells * SAMPLE)), metric != "l2"
            sample = torch.cat([block[::step].float() for block in normalized_blocks(keys.blocks, metric)()])
            kmeans = faiss.Kmeans(
                keys.width, self.cells, niter=STEPS, seed=0, spherical=spherical, max_points_per_centroid=SAMPLE
            )
            kmeans.train(sample.numpy())
            write_array(file, np.asarray(kmeans.centroids))
        return file

    def fill(self, keys: Keys, metric: str, trained: Path, folder: Path, bar: Any) -> None:
        """Assign keys to their nearest centroids and sort them by cell; a killed run resumes at its last block."""
        if (folder / CELLS).exists():  # it is written last
            bar.update(len(keys))
        else:
            blocks, centroid, assigned = normalized_blocks(keys.blocks, metric), np.load(trained), []
            for number, block in enumerate(blocks()):
                file = cells_file(folder, number)
                if not file.exists():
                    write_array(file, nearest_centroid(block, centroid, metric))
                assigned.append(np.load(file))
                bar.update(len(block))
            cell = np.concatenate(assigned)
            order = np.argsort(cell, kind="stable")
            sort_keys(blocks, order, centroid.shape[1], folder / KEYS)
            start = np.concatenate([[0], np.bincount(cell, minlength=len(centroid)).cumsum()])
            columns = {"centroid": centroid, "start": start, "number": order}
            write_tensors(folder / CELLS, {name: torch.from_numpy(column) for name, column in columns.items()})
        for file in folder.glob("part-*.npy"):
            file.unlink()

    def open(self, folder: Path, metric: str, nprobe: int, device: str) -> IVFSearch:
        return IVFSearch(folder, metric, nprobe)


def assign_cells(keys: Keys, metric: str, trained: Path, file: Path) -> None:
    """Write the cell of each key of a single block, for a worker that shares this work with others."""
    (block,) = normalized_blocks(keys.blocks, metric)()
    write_array(file, nearest_centroid(block, np.load(trained), metric))


def cells_file(folder: Path, number: int) -> Path:
    """Return the file with the cells of a block of keys, until the keys are sorted by them."""
    return folder / f"part-{number:05d}.npy"


def nearest_centroid(keys: Float[Tensor, "m d"], centroid: np.ndarray, metric: str) -> np.ndarray:
    """Return the cell of each key."""
    centroids = torch.from_numpy(centroid)
    blocks = keys.split(max(1, SIMILARITIES // len(centroids)))
    return torch.cat([similarity(block.float(), centroids, metric).argmax(1) for block in blocks]).int().numpy()


def sort_keys(blocks: Blocks, number: np.ndarray, width: int, file: Path) -> None:
    """Write the keys sorted by cell to ``file``; ``number`` lists them in that order."""
    rank = np.empty_like(number)
    rank[number] = np.arange(len(number))
    aside, first, sorted_ = file.with_suffix(".aside.npy"), 0, None
    for keys in blocks():
        values = (keys.float() if keys.dtype == torch.bfloat16 else keys).numpy()  # NumPy has no bfloat16
        if sorted_ is None:
            sorted_ = new_array(aside, values.dtype, (len(number), width))
        sorted_[rank[first : first + len(keys)]] = values
        first += len(keys)
    assert sorted_ is not None
    sorted_.flush()
    aside.replace(file)
