"""Attention to the best entries of a memory: exact top-k or the best of strided buckets, then one softmax over those.

Neither the search nor the stored entries have a gradient; the queries do, through the logits of what was
found. A table of entries [b m h d] is read in place, so that no [b h q k d] tensor is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

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
    """The k largest of each row, the best first: the k largest group maxima hold them all."""
    m = score.shape[-1]
    if m % GROUP or m // GROUP <= 2 * k:
        return score.topk(k, dim=-1).indices
    groups = m // GROUP
    best = score.unflatten(-1, (GROUP, groups)).amax(-2).topk(k, dim=-1, sorted=False).indices
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


@torch.no_grad()
def search(query: Float[Tensor, "b h q d"], table: Table, k: int, top: Top, watch: Watch | None = None) -> Found:
    """What each query finds; empty slots come last. ``watch`` is told of each row's scores and slots, block by block.

    All scores go through one buffer: to get fresh memory for them would cost as much as to compute them.
    """
    b, h, length, _ = query.shape
    keys, asked = table.key.permute(0, 2, 3, 1), query.to(table.key.dtype)
    slot = torch.empty(b, h, length, k, dtype=torch.long, device=query.device)
    product = torch.empty(b, h, length, k, dtype=asked.dtype, device=query.device)
    size = min(length, max(1, CELLS // (h * keys.shape[-1])))
    full = bool(table.filled.all())
    buffer = asked.new_empty(h * size * keys.shape[-1])
    for row in range(b):
        for start in range(0, length, size):
            block = slice(start, min(start + size, length))
            score = buffer[: h * (block.stop - start) * keys.shape[-1]].view(h, -1, keys.shape[-1])
            torch.bmm(asked[row, :, block], keys[row], out=score)
            if not full:
                score.masked_fill_(~table.filled[row], -torch.inf)
            slot[row, :, block] = top(score, k)
            product[row, :, block] = score.gather(-1, slot[row, :, block])
            if watch is not None:
                watch(row, block, score, slot[row, :, block])
    return Found(slot, product.masked_fill_(product == -torch.inf, 0.0))  # empty slots hold zeros


def attend(query: Float[Tensor, "b h q d"], table: Table, found: Found, empty_take_mass: bool) -> Float[Tensor, "b h q d"]:
    """The softmax over what was found, times the values; nothing found gives zeros.

    ``empty_take_mass`` is the official code's quirk: empty slots are zero keys, whose logit is 0, not masked ones.
    """
    index = cells(found.slot, table)
    logits = Products.apply(query, found.product, table.key, index)
    if not empty_take_mass:
        filled = table.filled[torch.arange(len(query), device=query.device)[:, None, None, None], found.slot]
        logits = logits.masked_fill(~filled, -torch.inf)
    return weighted(table.value, index, attention(logits))
