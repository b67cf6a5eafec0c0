"""The memory of a kNN-augmented attention layer: its entries, their search, and the gate (Wu et al. 2022, section 3.1)."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import nn

from trime.common.types import AttentionBlock, Bool, Float, Int, Tensor
from trime.kv.bounded import BoundedMemory, MemoryState
from trime.kv.eviction.base import AttentionScorePolicy, EvictionPolicy, Summary
from trime.layers.attention import AttentionTrace
from trime.layers.topk_attention import (
    SCORES_PER_BLOCK,
    ScoreCallback,
    SearchKeys,
    Table,
    TopK,
    all_keys,
    attend,
    attention_weights,
    bucket_top,
    exact_top,
    search,
    select_candidates,
)
from trime.token_memory.search.search import MIN_POINTS_PER_CELL, TRAINING_POINTS_PER_CELL

SEARCHES = {"exact": exact_top, "buckets": bucket_top, "approximate": exact_top, "faiss": exact_top}
CANDIDATE_SEARCHES = ("approximate", "faiss")  # searches that score some of the entries only
GATES = ("bias", "content")


class KeyValueState(NamedTuple):
    """The entries, and those of the last segment, which are inserted when the next one is read."""

    # Written in place when the next segment is read: a state may be read again until the state after it has been read.
    entries: MemoryState
    pending: tuple[Tensor, Tensor]  # keys and values [b h l d] of the last segment
    position: Int[Tensor, "b l"]
    observing: Float[Tensor, "b h s d"]  # queries of the last segment


class KeyValueMemory(nn.Module):
    """The ``size`` entries of each row that the eviction policy keeps, and a layer's attention to the ``top_k`` best.

    ``search``: exact; approximate, among the ``candidates`` entries of a head that ``observation_queries`` queries of the
    last segment select; faiss, among as many in the cells nearest to each query; buckets, the best of strided buckets (as in
    the official code). ``per_head``: every head keeps entries of its own. ``gate``: the paper's scalar of each head (bias),
    or a linear function of the token as well (content). At size 0 the memory is always empty.
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
        observation_queries: int = 32,
    ):
        super().__init__()
        if not isinstance(top_k, int) or not 1 <= top_k <= (size or top_k):
            raise ValueError(f"top_k={top_k} must lie in 1..memory_size={size}: lower top_k or raise model.memory_size")
        if search not in SEARCHES or gate not in GATES:
            raise ValueError(f"search={search}, gate={gate}: choose search from {[*SEARCHES]}, gate from {[*GATES]}")
        if search == "buckets" and size % top_k:
            raise ValueError(f"search=buckets needs model.memory_size={size} to be a multiple of top_k={top_k}")
        if search in CANDIDATE_SEARCHES and (observation_queries < 1 or candidates < top_k):
            given = f"observation_queries={observation_queries}, candidates={candidates}"
            raise ValueError(f"search={search}: {given} must be at least 1 and {top_k}")
        if search in CANDIDATE_SEARCHES and isinstance(policy, AttentionScorePolicy):
            raise ValueError(f"search={search} scores only candidates: choose eviction=fifo, sink, lru or lfu, or search=exact")
        self.heads, self.top_k, self.top, self.per_head = heads, top_k, SEARCHES[search], per_head
        self.memory, self.empty_take_mass = BoundedMemory(size, policy), empty_take_mass
        self.observation_queries, self.candidates = (observation_queries, candidates) if search == "approximate" else (0, size)
        indexes = [IVFKeyIndex(candidates), IVFKeyIndex(candidates)]  # for evaluation, for training
        self.key_indexes = indexes if search == "faiss" else None
        self.partial = search in CANDIDATE_SEARCHES
        self.bias = nn.Parameter(torch.zeros(heads))
        self.content = nn.Linear(width, heads, bias=False) if gate == "content" else None

    def gate(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "_ h _ 1"]:
        """Return the share of each head's output that comes from memory."""
        if self.content is None:
            return self.bias.sigmoid().view(1, -1, 1, 1)
        return (self.content(x) + self.bias).sigmoid().transpose(1, 2)[..., None]

    def to_slots(self, x: Float[Tensor, "b h l d"]) -> Float[Tensor, "_ l _ d"]:
        """Return x with the slots as second axis; heads that keep entries of their own become rows."""
        return x.flatten(0, 1)[:, :, None] if self.per_head else x.transpose(1, 2)

    def initial_state(self, key: Float[Tensor, "b h l d"]) -> KeyValueState:
        """Return an empty memory for keys of this shape."""
        no_keys = key.detach()[:, :, :0]
        entries = self.memory.empty((self.to_slots(no_keys), self.to_slots(no_keys)))
        return KeyValueState(
            entries, (no_keys, no_keys), torch.zeros(len(key), 0, dtype=torch.long, device=key.device), no_keys
        )

    def reset(self, state: KeyValueState, rows: Bool[Tensor, " b"]) -> KeyValueState:
        entries = self.memory.reset(state.entries, self.expand_rows(rows))
        return state._replace(entries=entries, position=state.position.masked_fill(rows[:, None], -1))

    def expand_rows(self, values: Tensor) -> Tensor:
        """Expand values of batch rows to values of the memory's rows."""
        return values.repeat_interleave(self.heads, 0) if self.per_head else values

    def with_pending(self, state: KeyValueState) -> MemoryState:
        """Return the entries with the pending ones inserted; the state is not changed."""
        return self.memory.update(state.entries, *self.pending_entries(state))

    def pending_entries(self, state: KeyValueState) -> tuple[tuple[Tensor, ...], Int[Tensor, "r l"]]:
        """Return columns and positions of the pending entries, for the memory's rows."""
        return tuple(map(self.to_slots, state.pending)), self.expand_rows(state.position)

    def read(
        self, query: Float[Tensor, "b h l d"], state: KeyValueState, position: Int[Tensor, "b l"]
    ) -> tuple[Float[Tensor, "b h l d"], MemoryState]:
        """Return the queries' attention to the memory, and the memory with updated eviction scores."""
        if not self.memory.size:
            return torch.zeros_like(query), state.entries
        entries = self.memory.overwrite(state.entries, *self.pending_entries(state))
        queries, table, keys = self.prepare_search(query, entries, state.observing)
        if self.memory.policy.uses_attention:
            retrieved, entries = self.retrieve_and_rank(queries, table, keys, entries, position)
        else:
            retrieved = self.retrieve(queries, table, keys)
        return attend(queries, table, retrieved, self.empty_take_mass).view_as(query), entries

    def retrieve_and_rank(
        self,
        queries: Float[Tensor, "r g l d"],
        table: Table,
        keys: SearchKeys,
        entries: MemoryState,
        position: Int[Tensor, "b l"],
    ) -> tuple[TopK, MemoryState]:
        """Return the best entries of each query, and the memory with the scores of a policy that goes by attention."""
        policy, position, size = self.memory.policy, self.expand_rows(position), self.memory.size
        summary = policy.begin(entries.ranking)
        summaries = [Summary(*(column[row : row + 1] for column in summary)) for row in range(len(position))]

        def on_scores(row: int, block: slice, score: Tensor, best: Tensor) -> None:
            is_retrieved = torch.zeros_like(score, dtype=torch.bool).scatter(-1, best, True)
            observed = AttentionBlock(score[None], position[row : row + 1, block], is_retrieved[None])
            summaries[row] = policy.observe(summaries[row], observed)

        retrieved = self.retrieve(queries, table, keys, None if self.partial else on_scores)
        if self.partial:  # the search has scored candidates only: all other entries have -inf
            b, h, length, _ = retrieved.slot.shape
            count = max(1, SCORES_PER_BLOCK // (h * size))
            for row, start in itertools.product(range(b), range(0, length, count)):
                block = slice(start, start + count)
                slot, product = retrieved.slot[row, :, block], retrieved.product[row, :, block]
                score = product.new_full((*slot.shape[:2], size), -torch.inf)
                on_scores(row, block, score.scatter(-1, slot, product), slot)
        summary = Summary(*(torch.cat(columns) for columns in zip(*summaries, strict=True)))
        return retrieved, entries._replace(ranking=policy.finalize(entries.ranking, summary))

    def prepare_search(
        self, query: Float[Tensor, "b h l d"], entries: MemoryState, observing: Float[Tensor, "b h s d"]
    ) -> tuple[Float[Tensor, "r g l d"], Table, SearchKeys]:
        """Return queries for the memory's rows, the table of entries, and the keys to search."""
        table = Table(entries.columns[0], entries.columns[1], entries.ranking.position >= 0)
        queries, observing = (x.flatten(0, 1)[:, None] if self.per_head else x for x in (query, observing))
        if not observing.shape[2] or self.memory.size <= self.candidates:
            return queries, table, all_keys(table)
        return queries, table, select_candidates(table, observing, self.top_k, self.candidates)

    @torch.no_grad()
    def attention_traces(
        self, query: Float[Tensor, "b h 1 d"], state: KeyValueState, entries: MemoryState, gate: Float[Tensor, "_ h 1 1"]
    ) -> list[AttentionTrace]:
        """Return the attention of a query to ``entries``, the entries that it has read, multiplied by the gate."""
        if not self.memory.size:
            return []
        queries, table, keys = self.prepare_search(query, entries, state.observing)
        retrieved, positions = self.retrieve(queries, table, keys), entries.ranking.position
        position = positions[torch.arange(len(positions), device=positions.device)[:, None, None, None], retrieved.slot]
        weight = attention_weights(queries, table, retrieved, self.empty_take_mass)
        share = weight.view(*query.shape[:3], -1) * gate / self.heads
        return [AttentionTrace(share.flatten(1), position.view_as(share).flatten(1))]

    def retrieve(
        self, query: Float[Tensor, "r h l d"], table: Table, keys: SearchKeys, on_scores: ScoreCallback | None = None
    ) -> TopK:
        """Return the ``top_k`` best entries of each query."""
        if self.key_indexes is not None:  # keys change in training, so that each mode has an index of its own
            return self.key_indexes[self.training].search(query, table, self.top_k)
        return search(query, keys, self.top_k, self.top, on_scores)

    def write(
        self, entries: MemoryState, segment: tuple[Tensor, Tensor, Tensor], position: Int[Tensor, "b l"]
    ) -> KeyValueState:
        """Return the state with a segment's queries, keys and values, detached; keys and values are pending."""
        query, key, value = (tensor.detach() for tensor in segment)
        count = self.observation_queries
        observing = query[:, :, :: max(1, -(-query.shape[2] // count))] if count else query[:, :, :0]
        return KeyValueState(entries, (key, value), position, observing)


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
            rows = Table(*(column[exact] for column in table))
            slot[exact], product[exact] = search(query[exact], all_keys(rows), k, exact_top)
        for (row, head), index in self.indexes.items():
            score, number = index.search(to_numpy(query[row, head]), k)
            number = torch.from_numpy(number).to(slot.device)
            product[row, head] = torch.from_numpy(score).to(product).masked_fill(number < 0, -torch.inf)
            slot[row, head] = number.clamp(min=0)
        return TopK(slot, product)

    def refresh(self, table: Table) -> None:
        """Update every index to the table's present keys; the slots of a row are filled from the first one on."""
        tag = table.key[..., 0].float().masked_fill(~table.filled[..., None], torch.nan)
        if self.tag is None or self.tag.shape != tag.shape:
            self.tag, self.indexes, self.written = torch.full_like(tag, torch.nan), {}, {}
        # A slot was overwritten if the first number of its key differs: cheaper than to compare whole keys.
        changed, self.tag = (tag != self.tag) & table.filled[..., None], tag
        for (row, count), head in itertools.product(enumerate(table.filled.sum(1).tolist()), range(tag.shape[2])):
            key, row_head, size = table.key[row, :count, head], (row, head), tag.shape[1]
            slots = changed[row, :count, head].nonzero().squeeze(1)
            index, written = self.indexes.pop(row_head, None), self.written.get(row_head, 0) + len(slots)
            if index is None or count < index.ntotal or written > size:
                index, written = self.build_index(key, size), 0
            elif len(slots):
                overwritten = slots[slots < index.ntotal]
                if len(overwritten):
                    index.update_vectors(overwritten.cpu().numpy(), to_numpy(key[overwritten]))
                if count > index.ntotal:
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
    return key.float().cpu().contiguous().numpy()  # FAISS takes float32 only
