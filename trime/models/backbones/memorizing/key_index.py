"""Search in a large memory by FAISS: an inverted file for each row and head, which follows the stored keys in place.

The files are no state: they are made from a table of keys, and mended where it has changed since. Cells are made anew
when as many entries have come as the memory holds, for centroids of old keys serve new ones worse. Which cells there are
thus depends on when reading began: a training that is killed and goes on finds other entries now and then.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from trime.models.layers.topk_attention import Found, Table, every, exact_top, search
from trime.types import Float, Tensor

POINTS = 39  # entries a cell wants, as FAISS counts; with fewer, the search is exact


class Cells:
    """Looks at ``candidates`` of a head's entries, on average: those of the cells whose centroids lie nearest."""

    def __init__(self, candidates: int):
        self.candidates = candidates
        self.tag: Float[Tensor, "b m h"] | None = None  # a number of each stored key, NaN in empty slots
        self.files: dict[tuple[int, int], Any] = {}
        self.written: dict[tuple[int, int], int] = {}  # entries since a file was made

    @torch.no_grad()
    def search(self, query: Float[Tensor, "b h q d"], table: Table, k: int) -> Found:
        """What queries find; where there are fewer than k, products of -inf."""
        self.follow(table)
        exact = [row for row in range(len(query)) if (row, 0) not in self.files]
        slot = torch.zeros(*query.shape[:3], k, dtype=torch.long, device=query.device)
        product = torch.zeros(slot.shape, dtype=table.key.dtype, device=query.device)
        if exact:
            rows = Table(*(part[exact] for part in table))
            slot[exact], product[exact] = search(query[exact], every(rows), k, exact_top)
        for (row, head), file in self.files.items():
            score, number = file.search(vectors(query[row, head]), k)
            number = torch.from_numpy(number).to(slot.device)
            product[row, head] = torch.from_numpy(score).to(product).masked_fill(number < 0, -torch.inf)
            slot[row, head] = number.clamp(min=0)
        return Found(slot, product)

    def follow(self, table: Table) -> None:
        """Brings every file up to what the table holds."""
        tag = table.key[..., 0].float().masked_fill(~table.filled[..., None], torch.nan)
        if self.tag is None or self.tag.shape != tag.shape:
            self.tag, self.files, self.written = torch.full_like(tag, torch.nan), {}, {}
        changed, self.tag = (tag != self.tag) & table.filled[..., None], tag
        for row, count in enumerate(table.filled.sum(1).tolist()):
            for head in range(tag.shape[2]):
                self.bring(row, head, table.key[row, :count, head], changed[row, :, head])

    def bring(self, row: int, head: int, key: Float[Tensor, "n d"], changed: Tensor) -> None:
        """A file up to its keys; slots are filled from the first one on."""
        place, size = (row, head), len(changed)
        slots = changed[: len(key)].nonzero().squeeze(1)
        file, written = self.files.pop(place, None), self.written.get(place, 0) + len(slots)
        if file is None or len(key) < file.ntotal or written > size:
            file, written = self.made(key, size), 0
        elif len(slots):
            old = slots[slots < file.ntotal]
            if len(old):
                file.update_vectors(old.cpu().numpy(), vectors(key[old]))
            if len(key) > file.ntotal:
                file.add(vectors(key[file.ntotal :]))
        if file is not None:
            self.files[place], self.written[place] = file, written

    def made(self, key: Float[Tensor, "n d"], size: int) -> Any:
        """A file of some keys in a memory of that size; None where they are too few."""
        import faiss

        count = max(1, min(math.isqrt(size), size // (2 * POINTS)))
        if len(key) < max(POINTS * count, self.candidates):
            return None
        file: Any = faiss.index_factory(key.shape[1], f"IVF{count},Flat", faiss.METRIC_INNER_PRODUCT)
        file.cp.max_points_per_centroid = 64
        file.train(vectors(key))
        file.add(vectors(key))
        file.set_direct_map_type(faiss.DirectMap.Array)  # type: ignore[attr-defined]
        file.nprobe = max(1, count * self.candidates // size)
        return file


def vectors(key: Float[Tensor, "n d"]) -> Any:
    """As FAISS takes them."""
    return key.float().cpu().contiguous().numpy()
