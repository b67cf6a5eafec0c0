"""The memory of a kNN-augmented attention layer: what it holds, how it is searched, and its gate (Wu et al. 2022, 3.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from trime.eviction.base import EvictionPolicy, Summary
from trime.memory.bounded import BoundedMemory, Held
from trime.models.retrieval import Table, Watch, attend, bucket_top, exact_top, search
from trime.types import Attended, Bool, Float, Int, Tensor

SEARCHES = {"exact": exact_top, "buckets": bucket_top}
GATES = ("bias", "content")


class KeyValueMemory(nn.Module):
    """The ``size`` entries of each row that the policy keeps, and the attention of a layer to the ``top_k`` best.

    ``search``: exact, or (as the official code) the best of strided buckets. ``per_head``: every head keeps a
    set of its own. ``gate``: the paper's scalar of each head (bias), or a linear function of the token too.
    At size 0 every segment finds what a document's first one finds: nothing.
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
    ):
        super().__init__()
        if not isinstance(top_k, int) or not 1 <= top_k <= (size or top_k):
            raise ValueError(f"top_k={top_k} must lie in 1..memory_size={size}: lower top_k or raise model.memory_size")
        if search not in SEARCHES or gate not in GATES:
            raise ValueError(f"search={search}, gate={gate}: choose search from {[*SEARCHES]}, gate from {[*GATES]}")
        if search == "buckets" and size % top_k:
            raise ValueError(f"search=buckets wants model.memory_size={size} to be a multiple of top_k={top_k}")
        self.heads, self.top_k, self.top, self.per_head = heads, top_k, SEARCHES[search], per_head
        self.memory, self.empty_take_mass = BoundedMemory(size, policy), empty_take_mass
        self.told: Callable[[Tensor], None] | None = None  # hears of the slots that queries find
        self.bias = nn.Parameter(torch.zeros(heads))
        self.content = nn.Linear(width, heads, bias=False) if gate == "content" else None

    def gate(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "_ h _ 1"]:
        """How much of each head's output comes from memory."""
        if self.content is None:
            return self.bias.sigmoid().view(1, -1, 1, 1)
        return (self.content(x) + self.bias).sigmoid().transpose(1, 2)[..., None]

    def folded(self, x: Float[Tensor, "b h l d"]) -> Float[Tensor, "_ l _ d"]:
        """Slots first; heads that keep sets of their own are rows."""
        return x.flatten(0, 1)[:, :, None] if self.per_head else x.transpose(1, 2)

    def start(self, key: Float[Tensor, "b h l d"]) -> Held:
        """An empty memory for keys of that kind."""
        empty = self.folded(key.detach()[:, :, :0])
        return self.memory.empty((empty, empty))

    def reset(self, held: Held, rows: Bool[Tensor, " b"]) -> Held:
        """The memory without what some batch rows hold."""
        return self.memory.reset(held, self.rows(rows))

    def rows(self, b: Tensor) -> Tensor:
        """Something of each batch row as something of each row of the memory."""
        return b.repeat_interleave(self.heads, 0) if self.per_head else b

    def read(
        self, query: Float[Tensor, "b h l d"], held: Held, position: Int[Tensor, "b l"]
    ) -> tuple[Float[Tensor, "b h l d"], Held]:
        """What the queries make of the memory; the policy hears of their scores."""
        if not self.memory.size:
            return torch.zeros_like(query), held
        (key, value), policy = held.columns, self.memory.policy
        table = Table(key, value, held.ranking.position >= 0)
        asked, place = query.flatten(0, 1)[:, None] if self.per_head else query, self.rows(position)
        if not policy.by_attention:
            return self.found(asked, table).view_as(query), held
        whole = policy.begin(held.ranking)
        summaries = [Summary(*(part[row : row + 1] for part in whole)) for row in range(len(place))]

        def watch(row: int, block: slice, score: Tensor, slot: Tensor) -> None:
            retrieved = torch.zeros_like(score, dtype=torch.bool).scatter(-1, slot, True)
            attended = Attended(score[None], place[row : row + 1, block], retrieved[None])
            summaries[row] = policy.observe(summaries[row], attended)

        result = self.found(asked, table, watch)
        summary = Summary(*(torch.cat(parts) for parts in zip(*summaries, strict=True)))
        return result.view_as(query), held._replace(ranking=policy.settle(held.ranking, summary))

    def found(self, query: Float[Tensor, "r h l d"], table: Table, watch: Watch | None = None) -> Float[Tensor, "r h l d"]:
        """Search, then attention to what it finds."""
        found = search(query, table, self.top_k, self.top, watch)
        if self.told is not None:
            self.told(found.slot)
        return attend(query, table, found, self.empty_take_mass)

    def write(self, held: Held, own: tuple[Tensor, Tensor], position: Int[Tensor, "b l"]) -> Held:
        """The memory with a segment's keys and values."""
        columns = tuple(self.folded(part.detach()) for part in own)
        return self.memory.insert(held, columns, self.rows(position))[0]
