"""Attention to all or the best entries on the CPU against plain PyTorch: mask, search, softmax, other scores far away."""

from __future__ import annotations

import pytest
import torch

from trime.common.types import Tensor
from trime.memory.slots.eviction.base import topk_mask
from trime.models.layers.attention_cpu import Reach, attend

ROWS, HEADS, SHARED, QUERIES, SLOTS, WIDTH = 3, 4, 2, 21, 90, 5


def parts(seed: int) -> dict[str, Tensor]:
    """Return scores, positions and values; one row has padding on both sides, another has no entry at all."""
    torch.manual_seed(seed)
    query = torch.arange(70, 70 + QUERIES).repeat(ROWS, 1)
    key = torch.stack([torch.randperm(SLOTS) for _ in range(ROWS)])
    query[1, 15:], key[1, 3:9], key[2] = -1, -1, -1
    scores, far = torch.randn(2, ROWS, HEADS, QUERIES, SLOTS) * 3
    return {"logits": scores, "far": far, "query": query, "key": key, "value": torch.randn(ROWS, SLOTS, SHARED, WIDTH)}


def expected(given: dict[str, Tensor], top_k: int | None, reach: Reach) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, retrieved entries and attended values by plain PyTorch."""
    distance = given["query"][:, :, None] - given["key"][:, None]
    visible = (given["query"] >= 0)[:, :, None] & (given["key"] >= 0)[:, None]
    if reach.causal:
        visible &= distance >= 0
    if reach.window is not None:
        visible &= distance.abs() < reach.window
    logits = given["logits"]
    if reach.longest is not None:
        logits = torch.where((distance > reach.longest)[:, None], given["far"], logits)
    logits = logits.masked_fill(~visible[:, None], -torch.inf)
    retrieved = (visible[:, None] if top_k is None else topk_mask(logits, top_k) & visible[:, None]).expand_as(logits)
    weight = logits.masked_fill(~retrieved, -torch.inf).softmax(-1).nan_to_num(0)
    value = given["value"].transpose(1, 2).repeat_interleave(HEADS // SHARED, 1)
    return logits, retrieved, weight @ value


@pytest.mark.parametrize("top_k", [1, 7, 40, SLOTS - 1, SLOTS + 5, None])
@pytest.mark.parametrize("reach", [Reach(False), Reach(True), Reach(True, 13), Reach(False, 30), Reach(True, None, 25)])
def test_attention_is_that_of_plain_pytorch(top_k: int | None, reach: Reach) -> None:
    given = parts(top_k or 0)
    logits, retrieved, values = expected(given, top_k, reach)
    own, far = given["logits"].clone(), None if reach.longest is None else given["far"]
    result = attend(own, far, given["query"], given["key"], given["value"], top_k, reach)
    assert torch.equal(own, logits)
    assert result.retrieved is None if top_k is None else torch.equal(result.retrieved, retrieved)
    torch.testing.assert_close(result.attended, values, rtol=1e-5, atol=1e-5)
    assert not result.attended[2].any() and not result.attended[1, :, 15:].any(), "nothing is seen, nothing comes back"


@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_of_equal_scores_as_many_count_as_asked_for(top_k: int) -> None:
    """Also where neighbouring queries have nothing in common, so that guesses fail."""
    given = parts(0)
    logits = given["logits"].round() * torch.tensor([1e-3, 1.0, 1e3])[torch.arange(QUERIES) % 3][:, None]
    result = attend(logits, None, given["query"], given["key"], given["value"], top_k, Reach(False))
    assert torch.equal(result.retrieved.sum(-1)[0], torch.full((HEADS, QUERIES), top_k))
    least = logits.masked_fill(~result.retrieved, torch.inf).amin(-1)[0]
    torch.testing.assert_close(least, logits[0].topk(top_k).values[..., -1], rtol=0, atol=0)
