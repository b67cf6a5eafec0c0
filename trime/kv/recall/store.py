"""All entries of a layer that were read, from which queries get back the blocks that they attend to most.

A memory of a layer keeps some entries and its policy evicts the others; here nothing is lost. Blocks are of consecutive
positions of a text, and a row's entries are in the places of their positions, whatever padding the other rows have.
"""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from trime.common.checks import check_number, check_object
from trime.common.io import allocate
from trime.common.types import Bool, Float, Int, Tensor
from trime.errors import UserError
from trime.kv.bounded import take_slots
from trime.kv.recall.base import BlockKey, Gaussian
from trime.layers.attention import hide_

ROOM = 1024  # positions for which there is room at first
CANDIDATES = 4  # blocks for each that is returned, whose keys are all compared
SEARCHED = 32  # blocks for each that is returned, among which candidates are chosen: in longer texts those of the best regions
REGION = 16  # blocks
Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (query, its position, key, its position) -> logits [b h q m]


@dataclass(frozen=True)
class Recall:
    """Settings of recall: queries get back up to ``entries`` that the memory does not hold, in blocks of ``block``.

    ``key`` says what stands for a block. ``folder``: where the entries are, in files that go with the cache; None: in main
    memory.
    """

    entries: int
    block: int = 16
    key: BlockKey = field(default_factory=Gaussian)
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        check_number("entries", self.entries, at_least=1, whole=True)
        check_number("block", self.block, at_least=1, whole=True)
        check_object("key", self.key, BlockKey, "Gaussian()")

    @property
    def blocks(self) -> int:
        """The number of blocks to return; entries that are still in the memory are skipped."""
        return -(-self.entries // self.block)


class RecallQuery(NamedTuple):
    """Queries that look for blocks, their positions (-1: padding), and the logsumexp of their logits for what is held."""

    query: Float[Tensor, "b q h d"]
    at: Int[Tensor, "b q"]
    local: Float[Tensor, "b h q"]


class EntryStore:
    """The entries of a layer, as ``recall`` says: keys and values [p b g d], where p are positions."""

    def __init__(self, recall: Recall):
        self.recall = recall
        self.columns: list[Tensor] = []
        self.described: dict[int, Float[Tensor, "b r g n d"]] = {}  # keys of blocks and regions, by their size
        self.length: Int[Tensor, " b"] | None = None  # of each row's text

    def __copy__(self) -> EntryStore:
        """Return a store of the same tensors: give it rows of its own before either is written to."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), described=dict(self.described))
        return other

    @property
    def bytes(self) -> int:
        """The size of the entries in bytes, with the room for more."""
        return sum(column.nbytes for column in self.columns)

    @property
    def described_bytes(self) -> int:
        """Bytes of the keys of blocks and regions, which are on the device of the queries."""
        return sum(keys.nbytes for keys in self.described.values())

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
        first, last = int(position[real].min()), int(position.max())
        if real.all() and last - first == position.shape[1] - 1:  # rows are aligned, as always without padding
            for column, new in zip(self.columns, entries, strict=True):
                column[first : last + 1] = new.transpose(0, 1)
        else:
            row = torch.arange(len(key))[:, None].expand_as(position)
            for column, new in zip(self.columns, entries, strict=True):
                column[position[real], row[real]] = new[real]
        self.describe(first, last, device)

    def describe(self, begin: int, end: int, device: torch.device) -> None:
        """Compute the keys of the blocks, and of the regions that have ended, of positions from ``begin`` to ``end``."""
        block = self.recall.block
        for size, last in ((block, end // block + 1), (block * REGION, (end + 1) // (block * REGION))):
            first = begin // size
            if first >= last:
                continue
            # Where memories rotate keys these are stored before and after it: blocks are found by what is before.
            keys = self.columns[0][first * size : last * size, ..., : self.columns[1].shape[-1]]
            # They stay where queries come from, in the type of keys: each token that is written reads them.
            new = self.recall.key.of(keys.unflatten(0, (-1, size)).float(), self.filled(first, last, size))
            new = new.to(device, self.columns[0].dtype)
            old = self.described.get(size, new[:, :, :, :0])
            if old.shape[3] < last:
                # It is on the device: there is little room to spare.
                grown = new.new_zeros(*new.shape[:3], last + last // 8, new.shape[4])
                grown[:, :, :, : old.shape[3]] = old
                self.described[size] = grown
            self.described[size][:, :, :, first:last] = new

    def filled(self, first: int, last: int, size: int) -> Bool[Tensor, "n s b"]:
        """Return the mask of the places of some blocks of ``size`` that hold entries."""
        assert self.length is not None
        return (torch.arange(first * size, last * size)[:, None] < self.length).unflatten(0, (-1, size))

    def make_room(self, positions: int, entries: list[Tensor]) -> None:
        """Make room for a number of positions of entries like these; what is stored stays."""
        if self.columns and positions <= len(self.columns[0]):
            return
        region = self.recall.block * REGION
        room = -(-max(ROOM, 2 * positions) // region) * region
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
            Path(self.recall.folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.recall.folder) as file:
                allocate(file.fileno(), size)
                place = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise UserError(
                f"cannot store {size:,} bytes in {self.recall.folder}: {error.strerror}; name another folder"
            ) from None
        return torch.frombuffer(place, dtype=dtype).view(shape)

    @torch.no_grad()
    def best(
        self, asked: RecallQuery, held: Int[Tensor, "b m"], score: Score, scale: float
    ) -> tuple[Tensor, Tensor, Int[Tensor, "b n"]] | None:
        """Return keys and values [b n g d] of the best blocks for some queries, and positions, -1 for what is ``held`` already.

        The best are those to which some query attends most. Block keys, of logits ``scale`` times their products, choose
        candidates, and the largest ``score`` of their keys chooses among these. None where everything is held.
        """
        assert self.length is not None
        size, wanted, device = self.recall.block, self.recall.blocks, asked.query.device
        count = -(-int(self.length.max()) // size)
        held = held.cpu()
        stored = (self.length[:, None] - size * torch.arange(count)).clamp(0, size)
        missing = stored > blocks_of(held, size, count)  # [b n] has entries that are not held
        if not bool(missing.any()):
            return None
        chosen = torch.arange(count).expand(len(held), -1)
        if count > CANDIDATES * wanted:
            chosen = self.candidates(asked, missing, scale)
        of = self.places(chosen, held)
        if chosen.shape[1] > wanted:
            most = self.attended(asked, chosen, of.to(device), score)
            best = most.topk(wanted, 1).indices.cpu().sort(1).values
            chosen, of = chosen.gather(1, best), take_slots(of.unflatten(1, (-1, size)), best).flatten(1)
        key, value = (self.entries(number, chosen).to(device) for number in range(2))
        return key, value, of.to(device)

    def attended(
        self, asked: RecallQuery, blocks: Int[Tensor, "b r"], of: Int[Tensor, "b n"], score: Score
    ) -> Float[Tensor, "b r"]:
        """Return the largest share of a query's attention that each block gets by its best key, of keys at positions ``of``."""
        size = self.recall.block
        # The first entries of all blocks, then the second ones: the best of a block is then a maximum of whole vectors.
        columns = self.entries(0, blocks).to(of.device), of
        key, of = (column.unflatten(1, (-1, size)).transpose(1, 2).flatten(1, 2) for column in columns)
        hidden = (of < 0)[:, None] | (of[:, None] > asked.at[..., None])
        logits = hide_(score(asked.query, asked.at, key, of), hidden[:, None])
        return largest_share(logits.unflatten(-1, (size, -1)).amax(-2), asked)

    def candidates(self, asked: RecallQuery, missing: Bool[Tensor, "b n"], scale: float) -> Int[Tensor, "b r"]:
        """Return the blocks whose keys are worth comparing, of those with ``missing`` entries; in long texts by regions."""
        assert self.length is not None
        size, wanted, count = self.recall.block, self.recall.blocks, missing.shape[1]
        keys, blocks = self.described[size][:, :, :, :count], None
        if count > SEARCHED * wanted:
            regions = int(self.length.max()) // (size * REGION)  # those that have ended
            of_region = self.described[size * REGION][:, :, :, :regions]
            among = missing[:, : regions * REGION].unflatten(1, (regions, REGION)).any(-1)
            best = self.expected(asked, of_region, among, scale, size * REGION).topk(SEARCHED * wanted // REGION, 1).indices
            newest = torch.arange(regions * REGION, count).expand(len(best), -1)
            blocks = torch.cat([(best[..., None] * REGION + torch.arange(REGION)).flatten(1), newest], 1)
            keys = torch.stack([row.index_select(2, at) for row, at in zip(keys, blocks.to(keys.device), strict=True)])
            missing = missing.gather(1, blocks)
        best = self.expected(asked, keys, missing, scale, size).topk(CANDIDATES * wanted, 1).indices
        return (best if blocks is None else blocks.gather(1, best)).sort(1).values

    def expected(
        self, asked: RecallQuery, keys: Float[Tensor, "b r g n d"], missing: Bool[Tensor, "b n"], scale: float, size: int
    ) -> Float[Tensor, "b n"]:
        """Return the largest share of a query's attention that each block of ``size`` entries is expected to get."""
        query = asked.query
        grouped = (scale * query).transpose(1, 2).unflatten(1, (keys.shape[2], -1)).flatten(2, 3).to(keys)  # [b g h/g·q d]
        logits = self.recall.key.scores(grouped, keys.contiguous()).float().unflatten(2, (-1, query.shape[1])).flatten(1, 2)
        logits = logits.add_(math.log(size)).masked_fill_(~missing.to(query.device)[:, None, None], -torch.inf)
        return largest_share(logits, asked).cpu()

    def entries(self, column: int, blocks: Int[Tensor, "b r"]) -> Float[Tensor, "b n g s"]:
        """Return the keys (column 0) or values of each row's ``blocks``."""
        stored = self.columns[column].unflatten(0, (-1, self.recall.block))  # [n s b g d]
        taken = stored.new_empty(*blocks.shape, stored.shape[1], *stored.shape[3:])
        for into, of_row, chosen in zip(taken, stored.unbind(2), blocks, strict=True):
            torch.index_select(of_row, 0, chosen, out=into)  # whole blocks: three times as fast as an index
        return taken.flatten(1, 2)

    def places(self, blocks: Int[Tensor, "b r"], held: Int[Tensor, "b m"]) -> Int[Tensor, "b n"]:
        """Return the positions of the entries of each row's ``blocks``; -1 for those that are held or do not exist."""
        assert self.length is not None
        position = (blocks[..., None] * self.recall.block + torch.arange(self.recall.block)).flatten(1)
        return position.masked_fill((position >= self.length[:, None]) | is_among(position, held), -1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the length of each row's text [b], and its keys and values [p b g d], for ``take``."""
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
        if self.length is None:
            return
        self.described = {size: keys[rows.to(keys.device)] for size, keys in self.described.items()}
        rows = rows.cpu()
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


def largest_share(logits: Float[Tensor, "b h q n"], asked: RecallQuery) -> Float[Tensor, "b n"]:
    """Return the largest share of a query's attention that each block gets: over queries that are no padding, of all heads."""
    together = torch.logaddexp(logits.logsumexp(-1), asked.local.float())
    share = logits.sub(together[..., None]).exp_().sum(1).nan_to_num_(0)
    return share.masked_fill_((asked.at < 0)[..., None], 0).amax(1)


def blocks_of(position: Int[Tensor, "b m"], size: int, count: int) -> Int[Tensor, "b n"]:
    """Count the positions, -1 for none, in each block."""
    found = torch.zeros(len(position), count + 1, dtype=torch.long)
    block = torch.where(position < 0, count, position // size).clamp(max=count)
    return found.scatter_add(1, block, torch.ones_like(block))[:, :count]


def is_among(position: Int[Tensor, "b n"], held: Int[Tensor, "b m"]) -> Bool[Tensor, "b n"]:
    """Return the mask of the positions that are among those of the same row."""
    ordered = held.sort(1).values
    place = torch.searchsorted(ordered, position).clamp(max=ordered.shape[1] - 1)
    return ordered.gather(1, place) == position
