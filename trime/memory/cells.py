"""Search by cells (an inverted file), for queries that come in batches: a cell meets all queries that visit it in one product.

Keys lie sorted by cell, in the type in which they were encoded, so that similarities are exact; only which are compared is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trime.memory.largest import Largest
from trime.memory.similarity import at_one_length, similarity
from trime.types import Float, Int, Tensor, UserError

Blocks = Callable[[], Iterator[Tensor]]  # all keys, in blocks
SCORES = 2**24  # of which a batch of queries is given room: 64 MiB
SAMPLE, LEAST, STEPS = 64, 39, 10  # keys a cell on which centroids are trained, fewest of them; rounds of k-means


class Cells:
    """``probe`` cells, those whose centroids are nearest, are searched for each query."""

    kind = "approximate"

    def __init__(self, folder: Path, metric: str, probe: int):
        self.metric = metric
        try:
            parts = load_file(folder / "cells.safetensors")
            self.key = torch.from_numpy(np.load(folder / "key.npy", mmap_mode="c"))
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{folder} is truncated or no index ({error}): delete it and run stage datastore") from None
        self.centroid, self.start, self.number = parts["centroid"], parts["start"].numpy(), parts["number"].numpy()
        self.probe = min(probe, len(self.centroid))
        self.room = max(1, SCORES // (self.probe * max(1, int(np.diff(self.start).max()))))

    def nearest(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        asked = query.float().cpu()
        asked = at_one_length(asked) if self.metric == "cosine" else asked
        found = [self.batch(part, k) for part in asked.split(max(256, self.room))]
        score, number = (torch.cat(parts) for parts in zip(*found, strict=True))
        if self.metric == "l2":
            score -= asked.square().sum(1, keepdim=True)
        return score.to(query.device), number.to(query.device)

    def batch(self, query: Float[Tensor, "n d"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Every visited cell in turn, then every query."""
        visited = similarity(query, self.centroid, self.metric).topk(self.probe, 1).indices
        order = visited.flatten().argsort(stable=True)
        cells, counts = visited.flatten()[order].unique_consecutive(return_counts=True)
        sizes = torch.from_numpy(np.diff(self.start))[visited.flatten()]
        ends = sizes[order].cumsum(0)
        place = torch.empty_like(order).scatter_(0, order, ends - sizes[order]).view_as(visited)
        flat = torch.empty(int(ends[-1]))
        done, first = 0, 0
        for cell, count in zip(cells.tolist(), counts.tolist(), strict=True):
            rows = order[first : first + count] // self.probe
            keys = self.key[self.start[cell] : self.start[cell + 1]].float()
            self.products(query[rows], keys, flat[done : done + count * len(keys)].view(count, len(keys)))
            first, done = first + count, done + count * len(keys)
        largest = Largest(len(query), k)
        largest.take_tiles(flat, place, visited, self.start, self.number)
        return largest.best()

    def products(self, query: Float[Tensor, "q d"], key: Float[Tensor, "m d"], out: Float[Tensor, "q m"]) -> None:
        """Similarities, without what is the same for all keys of a query."""
        if self.metric == "l2":
            torch.addmm(key.square().sum(1)[None], query, key.T, beta=-1, alpha=2, out=out)
        else:
            torch.mm(query, key.T, out=out)


def build_cells(blocks: Blocks, entries: int, width: int, cells: int, metric: str, folder: Path, bar: Any) -> None:
    """Centroids by k-means, each key to its nearest, keys sorted; a killed build goes on with the block that it was at."""
    if entries < LEAST * cells:
        raise UserError(
            f"index.factory=Cells{cells} needs {LEAST * cells} entries and has {entries}: "
            "choose index=exact, fewer cells, or raise datastore.tokens"
        )
    centroid = once(folder / "centroid.npy", lambda: centroids(blocks, entries, width, cells, metric))
    chosen = []
    for shard, keys in enumerate(blocks()):
        chosen.append(once(folder / f"cell-{shard:05d}.npy", partial(nearest_centroid, keys, centroid, metric)))
        bar.update(len(keys))
    cell = np.concatenate(chosen)
    number = np.argsort(cell, kind="stable")
    sort_keys(blocks, number, width, folder / "key.npy")
    start = np.concatenate([[0], np.bincount(cell, minlength=cells).cumsum()])
    parts = {"centroid": torch.from_numpy(centroid), "start": torch.from_numpy(start), "number": torch.from_numpy(number)}
    save_file(parts, folder / "cells.partial")
    (folder / "cells.partial").replace(folder / "cells.safetensors")
    for file in (folder / "centroid.npy", *folder.glob("cell-*.npy")):
        file.unlink()


def once(file: Path, make: Callable[[], np.ndarray]) -> np.ndarray:
    """What a killed run has made already, or what is made and kept now."""
    if not file.exists():
        aside = file.with_suffix(".aside.npy")
        np.save(aside, make())
        aside.replace(file)
    return np.load(file)


def centroids(blocks: Blocks, entries: int, width: int, cells: int, metric: str) -> np.ndarray:
    """By FAISS, on an even sample of keys; for inner products and cosine at length 1."""
    import faiss

    step = max(1, entries // (cells * SAMPLE))
    sample = torch.cat([keys[::step].float() for keys in blocks()])
    kmeans = faiss.Kmeans(width, cells, niter=STEPS, seed=0, spherical=metric != "l2", max_points_per_centroid=SAMPLE)
    kmeans.train(sample.numpy())
    return np.asarray(kmeans.centroids)


def nearest_centroid(keys: Float[Tensor, "m d"], centroid: np.ndarray, metric: str) -> np.ndarray:
    """The cell of each key."""
    whole = torch.from_numpy(centroid)
    return torch.cat([similarity(part.float(), whole, metric).argmax(1) for part in keys.split(2**13)]).int().numpy()


def sort_keys(blocks: Blocks, number: np.ndarray, width: int, file: Path) -> None:
    """Every key to the place that its cell gives it."""
    place = np.empty_like(number)
    place[number] = np.arange(len(number))
    aside, first, sorted_ = file.with_suffix(".aside.npy"), 0, None
    for keys in blocks():
        if sorted_ is None:
            sorted_ = np.lib.format.open_memmap(aside, "w+", keys.numpy().dtype, (len(number), width))
        sorted_[place[first : first + len(keys)]] = keys.numpy()
        first += len(keys)
    assert sorted_ is not None
    sorted_.flush()
    aside.replace(file)
