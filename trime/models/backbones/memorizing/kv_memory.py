"""The memory of a kNN-augmented attention layer: what it holds, how it is searched, and its gate (Wu et al. 2022, 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from trime.eviction.base import AttentionScorePolicy, EvictionPolicy, Summary
from trime.memory.bounded import BoundedMemory, MemoryState
from trime.memory.objective.blockwise import slices
from trime.models.attention_trace import AttentionTrace
from trime.models.backbones.memorizing.key_index import IVFKeyIndex
from trime.models.layers.topk_attention import (
    SCORES_PER_BLOCK,
    ScoreCallback,
    SearchKeys,
    Table,
    TopK,
    all_keys,
    attend,
    attention_weights,
    bucket_top,
    candidates,
    exact_top,
    search,
)
from trime.types import AttentionBlock, Bool, Float, Int, Tensor

SEARCHES = {"exact": exact_top, "buckets": bucket_top, "approximate": exact_top, "faiss": exact_top}
PARTIAL = ("approximate", "faiss")  # not every entry is scored
GATES = ("bias", "content")


class KeyValueState(NamedTuple):
    """What is carried on: entries, and those of the last segment, which enter when the next one is read.

    The entries' tensors are written to then: a state may be read again until the state after it has been.
    """

    held: MemoryState
    waiting: tuple[Tensor, Tensor]  # keys and values [b h l d]
    position: Int[Tensor, "b l"]
    scout: Float[Tensor, "b h s d"]  # queries of the last segment


class KeyValueMemory(nn.Module):
    """The ``size`` entries of each row that the policy keeps, and the attention of a layer to the ``top_k`` best.

    ``search``: exact; approximate, among the ``candidates`` entries of a head that ``scouts`` queries of the last
    segment choose; faiss, among as many in the cells nearest to each query; or (as the official code) the best of
    strided buckets. ``per_head``: every head keeps a set of its own. ``gate``: the paper's scalar of each head (bias), or
    a linear function of the token too. At size 0 every segment finds what a document's first one finds: nothing.
    """

    def __init__(
        self,
        heads: int,
        width: int,
        size: int,
        policy: EvictionPolicy,
        top_k: int = 32,
        search: str = "exact",
        per_head: bool = False,
        gate: str = "bias",
        empty_take_mass: bool = False,
        candidates: int = 4096,
        scouts: int = 32,
    ):
        super().__init__()
        if not isinstance(top_k, int) or not 1 <= top_k <= (size or top_k):
            raise ValueError(f"top_k={top_k} must lie in 1..memory_size={size}: lower top_k or raise model.memory_size")
        if search not in SEARCHES or gate not in GATES:
            raise ValueError(f"search={search}, gate={gate}: choose search from {[*SEARCHES]}, gate from {[*GATES]}")
        if search == "buckets" and size % top_k:
            raise ValueError(f"search=buckets wants model.memory_size={size} to be a multiple of top_k={top_k}")
        if search in PARTIAL and (scouts < 1 or candidates < top_k):
            raise ValueError(f"search={search}: scouts={scouts} must be at least 1, candidates={candidates} at least {top_k}")
        if search in PARTIAL and isinstance(policy, AttentionScorePolicy):
            raise ValueError(
                f"search={search} scores candidates alone: choose eviction=fifo, sink, lru or lfu, or search=exact"
            )
        self.heads, self.top_k, self.top, self.per_head = heads, top_k, SEARCHES[search], per_head
        self.memory, self.empty_take_mass = BoundedMemory(size, policy), empty_take_mass
        self.scouts, self.candidates = (scouts, candidates) if search == "approximate" else (0, size)
        self.key_indexes = [IVFKeyIndex(candidates), IVFKeyIndex(candidates)] if search == "faiss" else None  # of evaluation, of training
        self.partial = search in PARTIAL
        self.on_retrieved: Callable[[Tensor], None] | None = None  # hears of the slots that queries find
        self.bias = nn.Parameter(torch.zeros(heads))
        self.content = nn.Linear(width, heads, bias=False) if gate == "content" else None

    def gate(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "_ h _ 1"]:
        """How much of each head's output comes from memory."""
        if self.content is None:
            return self.bias.sigmoid().view(1, -1, 1, 1)
        return (self.content(x) + self.bias).sigmoid().transpose(1, 2)[..., None]

    def rows_by_slot(self, x: Float[Tensor, "b h l d"]) -> Float[Tensor, "_ l _ d"]:
        """Slots first; heads that keep sets of their own are rows."""
        return x.flatten(0, 1)[:, :, None] if self.per_head else x.transpose(1, 2)

    def start(self, key: Float[Tensor, "b h l d"]) -> KeyValueState:
        """An empty memory for keys of that kind."""
        none = key.detach()[:, :, :0]
        held = self.memory.empty((self.rows_by_slot(none), self.rows_by_slot(none)))
        return KeyValueState(held, (none, none), torch.zeros(len(key), 0, dtype=torch.long, device=key.device), none)

    def reset(self, state: KeyValueState, rows: Bool[Tensor, " b"]) -> KeyValueState:
        """The memory without what some batch rows hold."""
        held = self.memory.reset(state.held, self.expand_rows(rows))
        return state._replace(held=held, position=state.position.masked_fill(rows[:, None], -1))

    def expand_rows(self, b: Tensor) -> Tensor:
        """Something of each batch row as something of each row of the memory."""
        return b.repeat_interleave(self.heads, 0) if self.per_head else b

    def with_pending(self, state: KeyValueState) -> MemoryState:
        """The entries with those that wait; the state stays as it is."""
        return self.memory.update(state.held, *self.pending_entries(state))

    def pending_entries(self, state: KeyValueState) -> tuple[tuple[Tensor, ...], Int[Tensor, "r l"]]:
        """What waits, as columns and positions of the memory's rows."""
        return tuple(map(self.rows_by_slot, state.waiting)), self.expand_rows(state.position)

    def read(
        self, query: Float[Tensor, "b h l d"], state: KeyValueState, position: Int[Tensor, "b l"]
    ) -> tuple[Float[Tensor, "b h l d"], MemoryState]:
        """What the queries make of the memory; the policy hears of their scores."""
        if not self.memory.size:
            return torch.zeros_like(query), state.held
        held = self.memory.overwrite(state.held, *self.pending_entries(state))
        policy = self.memory.policy
        asked, table, keys = self.prepare_search(query, held, state.scout)
        if not policy.uses_attention:
            return self.attend_to(asked, table, self.retrieve(asked, table, keys)).view_as(query), held
        whole, place = policy.begin(held.ranking), self.expand_rows(position)
        summaries = [Summary(*(part[row : row + 1] for part in whole)) for row in range(len(place))]

        def on_scores(row: int, block: slice, score: Tensor, best: Tensor) -> None:
            retrieved = torch.zeros_like(score, dtype=torch.bool).scatter(-1, best, True)
            attended = AttentionBlock(score[None], place[row : row + 1, block], retrieved[None])
            summaries[row] = policy.observe(summaries[row], attended)

        found = self.retrieve(asked, table, keys, None if self.partial else on_scores)
        if self.partial:
            tell(found, self.memory.size, on_scores)
        result = self.attend_to(asked, table, found)
        summary = Summary(*(torch.cat(parts) for parts in zip(*summaries, strict=True)))
        return result.view_as(query), held._replace(ranking=policy.finalize(held.ranking, summary))

    def prepare_search(
        self, query: Float[Tensor, "b h l d"], held: MemoryState, scout: Float[Tensor, "b h s d"]
    ) -> tuple[Float[Tensor, "r g l d"], Table, SearchKeys]:
        """Queries of the memory's rows, its entries, and the keys to search."""
        key, value = held.columns
        table = Table(key, value, held.ranking.position >= 0)
        asked, scout = (x.flatten(0, 1)[:, None] if self.per_head else x for x in (query, scout))
        few = scout.shape[2] and self.memory.size > self.candidates
        return asked, table, candidates(table, scout, self.top_k, self.candidates) if few else all_keys(table)

    @torch.no_grad()
    def attention_trace(
        self, query: Float[Tensor, "b h 1 d"], state: KeyValueState, held: MemoryState, gate: Float[Tensor, "_ h 1 1"]
    ) -> list[AttentionTrace]:
        """What the gate lets through of a query's attention to ``held``, the entries that it has read."""
        if not self.memory.size:
            return []
        asked, table, keys = self.prepare_search(query, held, state.scout)
        found, places = self.retrieve(asked, table, keys), held.ranking.position
        position = places[torch.arange(len(places), device=places.device)[:, None, None, None], found.slot]
        share = attention_weights(asked, table, found, self.empty_take_mass).view(*query.shape[:3], -1) * gate / self.heads
        return [AttentionTrace(share.flatten(1), position.view_as(share).flatten(1))]

    def retrieve(self, query: Float[Tensor, "r h l d"], table: Table, keys: SearchKeys, on_scores: ScoreCallback | None = None) -> TopK:
        """The best entries of each query."""
        if self.key_indexes is not None:
            return self.key_indexes[self.training].search(query, table, self.top_k)
        return search(query, keys, self.top_k, self.top, on_scores)

    def attend_to(self, query: Float[Tensor, "r h l d"], table: Table, found: TopK) -> Float[Tensor, "r h l d"]:
        """Attention to what was found."""
        if self.on_retrieved is not None:
            self.on_retrieved(found.slot)
        return attend(query, table, found, self.empty_take_mass)

    def write(self, held: MemoryState, own: tuple[Tensor, Tensor, Tensor], position: Int[Tensor, "b l"]) -> KeyValueState:
        """The memory, before which a segment's keys and values wait; its queries, keys and values are constants."""
        query, key, value = (part.detach() for part in own)
        scout = query[:, :, :: max(1, -(-query.shape[2] // self.scouts))] if self.scouts else query[:, :, :0]
        return KeyValueState(held, (key, value), position, scout)


def tell(found: TopK, size: int, on_scores: ScoreCallback) -> None:
    """Tells of what was found alone, block by block: of other entries nothing is known."""
    b, h, length, _ = found.slot.shape
    for row in range(b):
        for block in slices(length, max(1, SCORES_PER_BLOCK // (h * size))):
            slot, product = found.slot[row, :, block], found.product[row, :, block]
            score = product.new_full((*slot.shape[:2], size), -torch.inf)
            on_scores(row, block, score.scatter(-1, slot, product), slot)
