"""Attention to the best entries of a memory: exact top-k or the best of strided buckets, then one softmax over those.

Neither the search nor the stored entries have a gradient; the queries do, through the logits of what was
found. A table of entries [b m h d] is read in place, so that no [b h q k d] tensor is made.

A large memory can be searched approximately: queries of the segment before (an observation window, as in SnapKV,
Li et al. 2024) choose each head's candidates, and all else is exact among those. What the queries of a head look
for overlaps, so that this finds much also where keys are not normalised, and queries do not lie among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from trime.memory.objective.blockwise import slices
from trime.types import Bool, Float, Int, Tensor

Top = Callable[[Tensor, int], Tensor]  # scores [h q m] to the slots of the k best
Watch = Callable[[int, slice, Tensor, Tensor], None]
CELLS = 2**22  # scores held at a time: 16 MiB
GROUP = 16  # slots of which a first pass looks at the best alone


class Table(NamedTuple):
    """Stored keys and values, slot by slot."""

    key: Float[Tensor, "b m h d"]
    value: Float[Tensor, "b m h d"]
    filled: Bool[Tensor, "b m"]


class Found(NamedTuple):
    """The entries that each query attends to, and its inner products with them."""

    slot: Int[Tensor, "b h q k"]
    product: Float[Tensor, "b h q k"]


def exact_top(score: Float[Tensor, "*s m"], k: int) -> Int[Tensor, "*s k"]:
    """The k largest of each row, the best first: the groups of the k largest maxima hold them all."""
    m = score.shape[-1]
    if m % GROUP or m // GROUP <= 2 * k:
        return score.topk(k, dim=-1).indices
    groups = m // GROUP
    best = exact_top(score.unflatten(-1, (GROUP, groups)).amax(-2), k)
    slots = (best[..., None, :] + groups * torch.arange(GROUP, device=score.device)[:, None]).flatten(-2)
    return slots.gather(-1, score.gather(-1, slots).topk(k, dim=-1).indices)


def bucket_top(score: Float[Tensor, "*s m"], k: int) -> Int[Tensor, "*s k"]:
    """The best slot of each of k strided buckets (slot mod k), as the official code searches."""
    return score.unflatten(-1, (-1, k)).argmax(-2) * k + torch.arange(k, device=score.device)


class Products(torch.autograd.Function):
    """Inner products that the search has made, with their gradient to the queries."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, product: Tensor, key: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(key, index)
        return product.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        key, index = ctx.saved_tensors
        return weighted(key, index, gradient[0]), None, None, None


def weighted(entries: Float[Tensor, "b m h d"], index: Int[Tensor, "b h q k"], weight: Tensor) -> Float[Tensor, "b h q d"]:
    """Sum over k of weight times entry; ``index`` numbers the cells of [b m h]."""
    flat, (b, h, q, k) = entries.flatten(0, 2), index.shape
    bags = F.embedding_bag(index.reshape(-1, k), flat, per_sample_weights=weight.reshape(-1, k).to(flat), mode="sum")
    return bags.view(b, h, q, -1)


def cells(slot: Int[Tensor, "b h q k"], table: Table) -> Int[Tensor, "b h q k"]:
    """Slots as numbers of the cells of [b m h]."""
    b, m, h, _ = table.key.shape
    row, head = torch.arange(b, device=slot.device)[:, None, None, None], torch.arange(h, device=slot.device)[:, None, None]
    return (row * m + slot) * h + head


def attention(logits: Float[Tensor, "*s k"]) -> Float[Tensor, "*s k"]:
    """Softmax; a row with nothing to attend to (-inf alone) gives zeros."""
    nothing = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)


class Keys(NamedTuple):
    """What is searched: the keys of each head, and the slots that they stand in, where these are not all."""

    key: Float[Tensor, "b h m d"]
    filled: Bool[Tensor, "b _ m"]
    slot: Int[Tensor, "b h m"] | None = None


def every(table: Table) -> Keys:
    """The whole table."""
    return Keys(table.key.transpose(1, 2), table.filled[:, None])


@torch.no_grad()
def candidates(table: Table, scout: Float[Tensor, "b h s d"], k: int, count: int) -> Keys:
    """The ``count`` slots of each head that lie highest above some scout's k-th best, in its standard deviations."""
    keys, chosen, full = every(table), [], bool(table.filled.all())
    score = keys.key.new_empty(*scout.shape[1:3], keys.key.shape[2])
    for row in range(len(scout)):
        torch.bmm(scout[row].to(score), keys.key[row].transpose(1, 2), out=score)
        deviation = score[..., ::GROUP].std(-1, keepdim=True).clamp(min=1e-9)  # of a sample
        if not full:
            score.masked_fill_(~table.filled[row], -torch.inf)
        line = score.gather(-1, exact_top(score, k)[..., -1:]).clamp(min=-1e30)
        chosen.append(exact_top(score.sub_(line).div_(deviation).amax(1), count))
    slot = torch.stack(chosen).sort(-1).values
    rows, heads = (torch.arange(count, device=slot.device) for count in slot.shape[:2])
    return Keys(table.key[rows[:, None, None], slot, heads[:, None]], table.filled[rows[:, None, None], slot], slot)


@torch.no_grad()
def search(query: Float[Tensor, "b h q d"], keys: Keys, k: int, top: Top, watch: Watch | None = None) -> Found:
    """What each query finds; empty slots come last. ``watch`` is told of each row's scores and slots, block by block.

    All scores go through one buffer: to get fresh memory for them would cost as much as to compute them.
    """
    b, h, length, _ = query.shape
    m, asked = keys.key.shape[2], query.to(keys.key.dtype)
    slot = torch.empty(b, h, length, k, dtype=torch.long, device=query.device)
    product = torch.empty(b, h, length, k, dtype=asked.dtype, device=query.device)
    size = min(length, max(1, CELLS // (h * m)))
    full = bool(keys.filled.all())
    buffer = asked.new_empty(h * size * m)
    for row in range(b):
        for block in slices(length, size):
            score = buffer[: h * (block.stop - block.start) * m].view(h, -1, m)
            torch.bmm(asked[row, :, block], keys.key[row].transpose(1, 2), out=score)
            if not full:
                score.masked_fill_(~keys.filled[row][:, None], -torch.inf)
            best = top(score, k)
            product[row, :, block] = score.gather(-1, best)
            slot[row, :, block] = best if keys.slot is None else keys.slot[row][:, None].expand_as(score).gather(-1, best)
            if watch is not None:
                watch(row, block, score, best)
    return Found(slot, product.masked_fill_(product == -torch.inf, 0.0))  # empty slots hold zeros


def attend(query: Float[Tensor, "b h q d"], table: Table, found: Found, empty_take_mass: bool) -> Float[Tensor, "b h q d"]:
    """The softmax over what was found, times the values; nothing found gives zeros."""
    return weighted(table.value, cells(found.slot, table), shares(query, table, found, empty_take_mass))


def shares(query: Float[Tensor, "b h q d"], table: Table, found: Found, empty_take_mass: bool) -> Float[Tensor, "b h q k"]:
    """The softmax over what was found.

    ``empty_take_mass`` is the official code's quirk: empty slots are zero keys, whose logit is 0, not masked ones.
    """
    logits = Products.apply(query, found.product, table.key, cells(found.slot, table))
    if not empty_take_mass:
        filled = table.filled[torch.arange(len(query), device=query.device)[:, None, None, None], found.slot]
        logits = logits.masked_fill(~filled, -torch.inf)
    return attention(logits)
