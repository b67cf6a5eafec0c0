"""Search in a large memory by FAISS: an inverted file for each row and head, kept up to date with the stored keys.

The indexes are not part of the state: they are built from a table of keys, and updated where it has changed since. Cells are
learned anew once as many entries have been written as the memory holds, because centroids of old keys fit new ones worse.
The cells therefore depend on when reading began: a training that is killed and resumed retrieves other entries now and then.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from trime.memory.retrieval.search import MIN_POINTS_PER_CELL, TRAINING_POINTS_PER_CELL
from trime.models.layers.topk_attention import Table, TopK, all_keys, exact_top, search
from trime.types import Float, Tensor


class IVFKeyIndex:
    """An inverted-file index that compares ``candidates`` entries of a head on average: those in the nearest cells."""

    def __init__(self, candidates: int):
        self.candidates = candidates
        self.tag: Float[Tensor, "b m h"] | None = None  # the first number of each stored key, NaN in empty slots
        self.indexes: dict[tuple[int, int], Any] = {}  # by row and head
        self.written: dict[tuple[int, int], int] = {}  # entries written since an index was built

    @torch.no_grad()
    def search(self, query: Float[Tensor, "b h q d"], table: Table, k: int) -> TopK:
        """Return the ``k`` best entries of each query; where there are fewer, products are -inf."""
        self.refresh(table)
        exact = [row for row in range(len(query)) if (row, 0) not in self.indexes]
        slot = torch.zeros(*query.shape[:3], k, dtype=torch.long, device=query.device)
        product = torch.zeros(slot.shape, dtype=table.key.dtype, device=query.device)
        if exact:
            rows = Table(*(part[exact] for part in table))
            slot[exact], product[exact] = search(query[exact], all_keys(rows), k, exact_top)
        for (row, head), index in self.indexes.items():
            score, number = index.search(to_numpy(query[row, head]), k)
            number = torch.from_numpy(number).to(slot.device)
            product[row, head] = torch.from_numpy(score).to(product).masked_fill(number < 0, -torch.inf)
            slot[row, head] = number.clamp(min=0)
        return TopK(slot, product)

    def refresh(self, table: Table) -> None:
        """Update every index to what the table holds."""
        tag = table.key[..., 0].float().masked_fill(~table.filled[..., None], torch.nan)
        if self.tag is None or self.tag.shape != tag.shape:
            self.tag, self.indexes, self.written = torch.full_like(tag, torch.nan), {}, {}
        changed, self.tag = (tag != self.tag) & table.filled[..., None], tag
        for row, count in enumerate(table.filled.sum(1).tolist()):
            for head in range(tag.shape[2]):
                self.refresh_index(row, head, table.key[row, :count, head], changed[row, :, head])

    def refresh_index(self, row: int, head: int, key: Float[Tensor, "n d"], changed: Tensor) -> None:
        """Update the index of a row and head, whose slots are filled from the first one on."""
        row_head, size = (row, head), len(changed)
        slots = changed[: len(key)].nonzero().squeeze(1)
        index, written = self.indexes.pop(row_head, None), self.written.get(row_head, 0) + len(slots)
        if index is None or len(key) < index.ntotal or written > size:
            index, written = self.build_index(key, size), 0
        elif len(slots):
            overwritten = slots[slots < index.ntotal]
            if len(overwritten):
                index.update_vectors(overwritten.cpu().numpy(), to_numpy(key[overwritten]))
            if len(key) > index.ntotal:
                index.add(to_numpy(key[index.ntotal :]))
        if index is not None:
            self.indexes[row_head], self.written[row_head] = index, written

    def build_index(self, key: Float[Tensor, "n d"], size: int) -> Any:
        """Return a new index for a memory of ``size`` entries; None where there are too few keys: the search is then exact."""
        import faiss

        count = max(1, min(math.isqrt(size), size // (2 * MIN_POINTS_PER_CELL)))
        if len(key) < max(MIN_POINTS_PER_CELL * count, self.candidates):
            return None
        index: Any = faiss.index_factory(key.shape[1], f"IVF{count},Flat", faiss.METRIC_INNER_PRODUCT)
        index.cp.max_points_per_centroid = TRAINING_POINTS_PER_CELL
        index.train(to_numpy(key))
        index.add(to_numpy(key))
        index.set_direct_map_type(faiss.DirectMap.Array)  # type: ignore[attr-defined]
        index.nprobe = max(1, count * self.candidates // size)
        return index


def to_numpy(key: Float[Tensor, "n d"]) -> Any:
    """Return keys as the float32 array that FAISS expects."""
    return key.float().cpu().contiguous().numpy()
