"""Attention to the best entries of a memory: exact top-k or the best of strided buckets, then one softmax over those.

Neither the search nor the stored entries have a gradient; the queries do, through the logits of the retrieved entries. A table
of entries [b m h d] is read in place, so that no [b h q k d] tensor is made.

A large memory can be searched approximately: queries of the previous segment (an observation window, as in SnapKV, Li et al.
2024) select each head's candidates, and the search is exact among those. The queries of a head retrieve similar entries, so
that recall is high even where keys are not normalized, and keys and queries have different distributions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from trime.common.types import Bool, Float, Int, Tensor

Top = Callable[[Tensor, int], Tensor]  # (scores [h q m], k) -> slots of the k best
ScoreCallback = Callable[[int, slice, Tensor, Tensor], None]  # (row, block of queries, scores [h q m], slots [h q k])
SCORES_PER_BLOCK = 2**22  # scores in memory at a time: 16 MiB in float32
GROUP = 16  # slots of which a first pass compares only the maximum


class Table(NamedTuple):
    """Stored keys and values, slot by slot."""

    key: Float[Tensor, "b m h d"]
    value: Float[Tensor, "b m h d"]
    filled: Bool[Tensor, "b m"]


class TopK(NamedTuple):
    """The entries that each query attends to, and its inner products with them."""

    slot: Int[Tensor, "b h q k"]
    product: Float[Tensor, "b h q k"]


def exact_top(score: Float[Tensor, "*s m"], k: int) -> Int[Tensor, "*s k"]:
    """Return the k largest of each row, the best first: the groups of the k largest maxima contain them all."""
    m = score.shape[-1]
    if m % GROUP or m // GROUP <= 2 * k:
        return score.topk(k, dim=-1).indices
    groups = m // GROUP
    best = exact_top(score.unflatten(-1, (GROUP, groups)).amax(-2), k)
    # A group that holds one of the k best has one of the k largest maxima: 16 times fewer scores are sorted.
    slots = (best[..., None, :] + groups * torch.arange(GROUP, device=score.device)[:, None]).flatten(-2)
    return slots.gather(-1, score.gather(-1, slots).topk(k, dim=-1).indices)


def bucket_top(score: Float[Tensor, "*s m"], k: int) -> Int[Tensor, "*s k"]:
    """Return the best slot of each of k strided buckets (slot mod k), as the official code searches."""
    return score.unflatten(-1, (-1, k)).argmax(-2) * k + torch.arange(k, device=score.device)


class StoredProducts(torch.autograd.Function):
    """Inner products that the search has computed, with their gradient to the queries."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, product: Tensor, key: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(key, index)
        return product.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        key, index = ctx.saved_tensors
        return weighted_sum(key, index, gradient[0]), None, None, None


def weighted_sum(entries: Float[Tensor, "b m h d"], index: Int[Tensor, "b h q k"], weight: Tensor) -> Float[Tensor, "b h q d"]:
    """Return the sum over k of weight times entry; ``index`` addresses the flattened [b m h]."""
    flat, (b, h, q, k) = entries.flatten(0, 2), index.shape
    # A bag gathers and sums in one pass: no [b h q k d] tensor is made.
    bags = F.embedding_bag(index.reshape(-1, k), flat, per_sample_weights=weight.reshape(-1, k).to(flat), mode="sum")
    return bags.view(b, h, q, -1)


def flat_index(slot: Int[Tensor, "b h q k"], table: Table) -> Int[Tensor, "b h q k"]:
    """Return slots as indexes into the flattened [b m h]."""
    b, m, h, _ = table.key.shape
    row, head = torch.arange(b, device=slot.device)[:, None, None, None], torch.arange(h, device=slot.device)[:, None, None]
    return (row * m + slot) * h + head


def masked_softmax(logits: Float[Tensor, "*s k"]) -> Float[Tensor, "*s k"]:
    """Return the softmax; rows that are -inf throughout become zeros."""
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


class SearchKeys(NamedTuple):
    """The keys to search in each head, and their slots where these are not all keys."""

    key: Float[Tensor, "b h m d"]
    filled: Bool[Tensor, "b _ m"]
    slot: Int[Tensor, "b h m"] | None = None


def all_keys(table: Table) -> SearchKeys:
    return SearchKeys(table.key.transpose(1, 2), table.filled[:, None])


@torch.no_grad()
def select_candidates(table: Table, scout: Float[Tensor, "b h s d"], k: int, count: int) -> SearchKeys:
    """Return, for each head, the ``count`` keys that exceed some scout's k-th best score most, in standard deviations."""
    keys, slots, full = all_keys(table), [], bool(table.filled.all())
    score = keys.key.new_empty(*scout.shape[1:3], keys.key.shape[2])
    for row in range(len(scout)):
        torch.bmm(scout[row].to(score), keys.key[row].transpose(1, 2), out=score)
        deviation = score[..., ::GROUP].std(-1, keepdim=True).clamp(min=1e-9)  # estimated from a sample
        if not full:
            score.masked_fill_(~table.filled[row], -torch.inf)
        threshold = score.gather(-1, exact_top(score, k)[..., -1:]).clamp(min=-1e30)
        slots.append(exact_top(score.sub_(threshold).div_(deviation).amax(1), count))
    slot = torch.stack(slots).sort(-1).values
    rows, heads = (torch.arange(count, device=slot.device) for count in slot.shape[:2])
    return SearchKeys(table.key[rows[:, None, None], slot, heads[:, None]], table.filled[rows[:, None, None], slot], slot)


@torch.no_grad()
def search(query: Float[Tensor, "b h q d"], keys: SearchKeys, k: int, top: Top, on_scores: ScoreCallback | None = None) -> TopK:
    """Return the ``k`` best entries of each query; ``on_scores`` gets each row's scores and slots. Empty slots come last."""
    b, h, length, _ = query.shape
    m, query = keys.key.shape[2], query.to(keys.key.dtype)
    slot = torch.empty(b, h, length, k, dtype=torch.long, device=query.device)
    product = torch.empty(b, h, length, k, dtype=query.dtype, device=query.device)
    size = min(length, max(1, SCORES_PER_BLOCK // (h * m)))
    full = bool(keys.filled.all())
    # One buffer for all scores: to allocate memory for each block would take as long as to compute it.
    buffer = query.new_empty(h * size * m)
    for row in range(b):
        for start in range(0, length, size):
            block = slice(start, start + size)
            queries = query[row, :, block]
            score = buffer[: h * queries.shape[1] * m].view(h, -1, m)
            torch.bmm(queries, keys.key[row].transpose(1, 2), out=score)
            if not full:
                score.masked_fill_(~keys.filled[row][:, None], -torch.inf)
            best = top(score, k)
            product[row, :, block] = score.gather(-1, best)
            slot[row, :, block] = best if keys.slot is None else keys.slot[row][:, None].expand_as(score).gather(-1, best)
            if on_scores is not None:
                on_scores(row, block, score, best)
    return TopK(slot, product.masked_fill_(product == -torch.inf, 0.0))  # empty slots hold zeros


def attend(query: Float[Tensor, "b h q d"], table: Table, retrieved: TopK, empty_take_mass: bool) -> Float[Tensor, "b h q d"]:
    """Return attention to the retrieved entries; a query that has retrieved nothing gets zeros."""
    weight = attention_weights(query, table, retrieved, empty_take_mass)
    return weighted_sum(table.value, flat_index(retrieved.slot, table), weight)


def attention_weights(
    query: Float[Tensor, "b h q d"], table: Table, retrieved: TopK, empty_take_mass: bool
) -> Float[Tensor, "b h q k"]:
    """Return the softmax over the retrieved entries."""
    logits = StoredProducts.apply(query, retrieved.product, table.key, flat_index(retrieved.slot, table))
    # In the official code empty slots are zero keys, whose logit 0 takes a share of the softmax.
    if not empty_take_mass:
        filled = table.filled[torch.arange(len(query), device=query.device)[:, None, None, None], retrieved.slot]
        logits = logits.masked_fill(~filled, -torch.inf)
    return masked_softmax(logits)
