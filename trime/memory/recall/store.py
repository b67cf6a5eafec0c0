"""All entries of a layer that were read, from which queries get back the blocks that they attend to most.

A memory of a layer keeps some entries and its policy evicts the others; here nothing is lost. Blocks are of consecutive
positions of a text, and a row's entries are in the places of their positions, whatever padding the other rows have.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trime.common.checks import check_number
from trime.common.types import Bool, Float, Int, Tensor
from trime.errors import UserError
from trime.memory.recall.base import BlockKey
from trime.memory.recall.mean import MeanKey

ROOM = 1024  # positions for which there is room at first


@dataclass(frozen=True)
class Recall:
    """What queries get back: up to ``entries`` of a text that the memory does not hold, in blocks of ``block``.

    ``key`` says what stands for a block. ``folder``: where the entries are, in files that go with the cache; None: in main
    memory.
    """

    entries: int
    block: int = 32
    key: BlockKey = field(default_factory=MeanKey)
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        check_number("entries", self.entries, at_least=1, whole=True)
        check_number("block", self.block, at_least=1, whole=True)

    @property
    def blocks(self) -> int:
        """How many blocks are returned: a block may be in the memory in part, and is returned without that."""
        return -(-self.entries // self.block)


class EntryStore:
    """The entries of a layer, as ``recall`` says: keys and values [p b g d], where p are positions."""

    def __init__(self, recall: Recall):
        self.recall = recall
        self.columns: list[Tensor] = []
        self.block_keys: Float[Tensor, "n b r g d"] | None = None
        self.length: Int[Tensor, " b"] | None = None  # of each row's text

    @property
    def bytes(self) -> int:
        """The size of the entries in bytes, with the room for more."""
        return sum(column.nbytes for column in self.columns)

    @torch.no_grad()
    def write(self, key: Float[Tensor, "b l g s"], value: Float[Tensor, "b l g d"], position: Int[Tensor, "b l"]) -> None:
        """Add entries at their positions; -1 is no entry."""
        device, position = key.device, position.cpu()
        length = torch.zeros(len(key), dtype=torch.long) if self.length is None else self.length
        self.length = torch.maximum(length, position.amax(1) + 1)
        entries = [column.detach().cpu() for column in (key, value)]
        self.make_room(int(self.length.max()), entries)
        real = position >= 0
        if not real.any():
            return
        row = torch.arange(len(key))[:, None].expand_as(position)
        for column, new in zip(self.columns, entries, strict=True):
            column[position[real], row[real]] = new[real]
        self.describe(int(position[real].min()), int(position[real].max()), device)

    def describe(self, begin: int, end: int, device: torch.device) -> None:
        """Compute what stands for the blocks of positions from ``begin`` to ``end``."""
        size = self.recall.block
        first, last = begin // size, end // size + 1
        filled = self.filled(first, last)
        # Where memories rotate keys these are stored before and after it, side by side: blocks are found by what is before.
        keys = self.columns[0][first * size : last * size, ..., : self.columns[1].shape[-1]]
        blocks = keys.unflatten(0, (-1, size)).float()
        new_keys = self.recall.key.of(blocks, filled).to(device)  # stay where queries come from
        if self.block_keys is None:
            self.block_keys = new_keys.new_zeros(0, *new_keys.shape[1:])
        if len(self.block_keys) < last:
            grown = new_keys.new_zeros(len(self.columns[0]) // size, *new_keys.shape[1:])
            grown[: len(self.block_keys)] = self.block_keys
            self.block_keys = grown
        self.block_keys[first:last] = new_keys

    def filled(self, first: int, last: int) -> Bool[Tensor, "n s b"]:
        """Return which places of some blocks hold entries."""
        assert self.length is not None
        size = self.recall.block
        return (torch.arange(first * size, last * size)[:, None] < self.length).unflatten(0, (-1, size))

    def make_room(self, positions: int, entries: list[Tensor]) -> None:
        """Make room for a number of positions of entries like these; what is stored stays."""
        if self.columns and positions <= len(self.columns[0]):
            return
        size = self.recall.block
        room = -(-max(ROOM, 2 * positions) // size) * size
        grown = []
        for number, entry in enumerate(entries):
            column = self.allocated((room, len(entry), *entry.shape[2:]), entry.dtype)
            if self.columns:
                column[: len(self.columns[number])] = self.columns[number]
            grown.append(column)
        self.columns = grown

    def allocated(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in main memory, or in a file that is deleted with it; UserError where there is no room for that."""
        if self.recall.folder is None:
            return torch.zeros(shape, dtype=dtype)
        size = torch.Size(shape).numel() * dtype.itemsize
        try:
            with tempfile.TemporaryFile(dir=self.recall.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is told here, and not by a signal when it is written
                place = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise UserError(
                f"cannot store {size:,} bytes in {self.recall.folder}: {error.strerror}; name another folder"
            ) from None
        return torch.frombuffer(place, dtype=dtype).view(shape)

    @torch.no_grad()
    def best(
        self,
        query: Float[Tensor, "b q h d"],
        at: Int[Tensor, "b q"],
        held: Int[Tensor, "b m"],
        local: Float[Tensor, "b h q"],
        scale: float,
    ) -> tuple[Tensor, Tensor, Int[Tensor, "b n"]] | None:
        """Return keys and values [b n g d] of the best blocks for some queries, and positions, -1 for what is ``held`` already.

        A block's score is the attention that it would get if its keys were those that stand for it, beside what is held, of
        whose logits ``local`` is the logsumexp; summed over queries and heads. None where everything is held.
        """
        assert self.length is not None and self.block_keys is not None
        size, longest = self.recall.block, int(self.length.max())
        count = -(-longest // size)
        held = held.cpu()
        missing = self.filled(0, count).sum(1).T - blocks_of(held, size, count)  # [b n] entries that are not held
        if not bool((missing > 0).any()):
            return None
        score = self.attention(query, at, missing > 0, local, scale)
        chosen = score.topk(min(self.recall.blocks, count), 1).indices.sort(1).values
        row = torch.arange(len(query))[:, None]
        position = (chosen[..., None] * size + torch.arange(size)).flatten(1)
        hidden = (position >= self.length[:, None]) | is_among(position, held)
        key, value = (column.unflatten(0, (-1, size))[chosen, :, row].flatten(1, 2).to(query.device) for column in self.columns)
        return key, value, position.masked_fill(hidden, -1).to(query.device)

    def attention(
        self,
        query: Float[Tensor, "b q h d"],
        at: Int[Tensor, "b q"],
        missing: Bool[Tensor, "b n"],
        local: Float[Tensor, "b h q"],
        scale: float,
    ) -> Float[Tensor, "b n"]:
        """Return the expected attention of all queries and heads to each block."""
        assert self.block_keys is not None
        keys = self.block_keys[: missing.shape[1]].permute(1, 3, 0, 2, 4)  # [b g n r d]
        grouped = query.float().transpose(1, 2).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # [b g h/g·q d]
        logits = scale * self.recall.key.scores(grouped, keys) + math.log(self.recall.block)
        logits = logits.masked_fill(~missing.to(query.device)[:, None, None], -torch.inf)
        local = local.float().unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        weight = (logits - torch.logaddexp(logits.logsumexp(-1), local)[..., None]).exp().nan_to_num(0)
        real = (at >= 0).to(weight).repeat(1, query.shape[2] // keys.shape[1])  # [b h/g·q]
        return (weight * real[:, None, :, None]).sum((1, 2)).cpu()

    def tensors(self) -> dict[str, Tensor]:
        """Return what ``take`` needs."""
        assert self.length is not None
        longest = int(self.length.max())
        return {"length": self.length, "stored_key": self.columns[0][:longest], "stored_value": self.columns[1][:longest]}

    def take(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Go on with what another store has returned as ``tensors``."""
        self.length = tensors["length"]
        stored = [tensors["stored_key"], tensors["stored_value"]]
        self.make_room(len(stored[0]), [column.transpose(0, 1) for column in stored])
        for column, entries in zip(self.columns, stored, strict=True):
            column[: len(entries)] = entries
        self.describe(0, len(stored[0]) - 1, device)

    def take_rows(self, rows: Int[Tensor, " r"]) -> None:
        """Continue with copies of these rows; repeats allowed."""
        if self.length is None or self.block_keys is None:
            return
        self.block_keys, rows = self.block_keys[:, rows.to(self.block_keys.device)], rows.cpu()
        self.length, taken = self.length[rows], []
        for column in self.columns:
            new = self.allocated((len(column), len(rows), *column.shape[2:]), column.dtype)
            torch.index_select(column, 1, rows, out=new)
            taken.append(new)
        self.columns = taken

    def forget(self, length: Int[Tensor, " b"]) -> None:
        """Forget each row's entries from position ``length`` on; others may be written there."""
        if self.length is not None:
            self.length = torch.minimum(self.length, length.cpu())


def blocks_of(position: Int[Tensor, "b m"], size: int, count: int) -> Int[Tensor, "b n"]:
    """Return how many of some positions, -1 for none, are in each block."""
    found = torch.zeros(len(position), count + 1, dtype=torch.long)
    block = torch.where(position < 0, count, position // size).clamp(max=count)
    return found.scatter_add(1, block, torch.ones_like(block))[:, :count]


def is_among(position: Int[Tensor, "b n"], held: Int[Tensor, "b m"]) -> Bool[Tensor, "b n"]:
    """Return which positions are among those of the same row."""
    ordered = held.sort(1).values
    place = torch.searchsorted(ordered, position).clamp(max=ordered.shape[1] - 1)
    return ordered.gather(1, place) == position
