"""What queries of an Attendre layer retrieve: the best entries, or the best of each bucket, with their positions."""

from __future__ import annotations

import pytest
import torch
from hydra.utils import instantiate

from tests.conftest import composed
from trime.kv.attendre import Attendre, retrieval_mask
from trime.kv.bounded import BoundedMemory
from trime.kv.eviction.fifo import FIFO
from trime.kv.layer_memory import DotProducts, LayerMemory
from trime.layers.rotary import dot_products

POSITION = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, -1, -1]])


def test_buckets_are_strided_and_hold_one_each() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, 10)
    mask = retrieval_mask(logits, 4, "buckets")
    assert mask is not None
    for bucket in range(4):
        in_bucket = logits[..., bucket::4]
        assert torch.equal(mask[..., bucket::4].sum(-1), torch.ones(2, 3, 4, dtype=torch.long))
        assert torch.equal(mask[..., bucket::4].byte().argmax(-1), in_bucket.argmax(-1))
    exact = retrieval_mask(logits, 4, "exact")
    assert exact is not None and not torch.equal(exact, mask) and retrieval_mask(logits, 10, "buckets") is None
    everything = retrieval_mask(logits, 5, "buckets")  # of two slots each
    assert everything is not None and bool((everything.sum(-1) == 5).all())


def test_retrieval_tells_similarity_and_place() -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, 6, heads, 8).double() for heads in (4, 2, 2))
    layer = LayerMemory(Attendre(BoundedMemory(5, FIFO()), top_k=3, causal=True), 6, DotProducts(), records=True)
    layer.step((query, key, value), POSITION)
    assert layer.last is not None
    similarity, of, _ = layer.last
    scores = dot_products(query, key)
    for row, count in enumerate((6, 4)):
        for cell in range(count):
            visible = [p for p in range(count) if count - 5 <= p <= cell]
            for head in range(4):
                best = sorted(((float(scores[row, head, cell, p]), p) for p in visible), reverse=True)[:3]
                found = similarity[row, head, cell]
                retrieved = sorted(zip(found[found > -torch.inf].tolist(), of[row, found > -torch.inf].tolist(), strict=True))
                assert [p for _, p in retrieved[::-1]] == [p for _, p in best]
                torch.testing.assert_close([s for s, _ in retrieved[::-1]], [s for s, _ in best])
    assert bool((similarity[1, :, 4:] == -torch.inf).all()), "no query, nothing retrieved"


@pytest.mark.parametrize("top_k", [2, 4, 40])
@pytest.mark.parametrize("name", ["lru", "lfu"])
def test_what_the_layer_retrieved_counts_as_used(name: str, top_k: int) -> None:
    """Of 40 entries a query uses as many as the layer's own top-k retrieves, neither 32 of them nor all."""
    torch.manual_seed(2)
    query, key, value = (torch.randn(1, 40, 1, 8).double() for _ in range(3))
    position = torch.arange(40)[None]
    memory = BoundedMemory(40, instantiate(composed(f"eviction={name}").eviction, _convert_="all"))
    layer = LayerMemory(Attendre(memory, top_k=top_k), 40, records=True)
    layer.step((query, key, value), position)
    assert layer.last is not None
    retrieved = (layer.last[0] > -torch.inf)[0, 0]
    assert bool((retrieved.sum(-1) == top_k).all())
    last = torch.where(retrieved, torch.arange(40)[:, None], -1).amax(0)
    expected = torch.where(last >= 0, last, torch.arange(40)) if name == "lru" else retrieved.sum(0)
    assert torch.equal(layer.state.ranking.score[0].long(), expected)
