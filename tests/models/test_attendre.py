"""What queries of an Attendre layer retrieve: the best entries, or the best of each bucket, with position and document."""

from __future__ import annotations

import pytest
import torch
from hydra.utils import instantiate

from tests.conftest import composed
from trime.eviction.fifo import FIFO
from trime.memory.bounded import BoundedMemory
from trime.models.attendre import Attendre, Queries, retrieval_mask
from trime.models.layers.rotary import dot_products

POSITION = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, -1, -1]])


def score(query: torch.Tensor, at: torch.Tensor, key: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return dot_products(query, key)


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


def test_retrieval_tells_similarity_place_and_document() -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, 6, heads, 8).double() for heads in (4, 2, 2))
    document = torch.tensor([[7, 7, 8, 8, 8, 9]]).expand(2, -1)
    layer = Attendre(BoundedMemory(5, FIFO()), top_k=3, causal=True)
    entries, queries = (key, value, document), Queries((query,), POSITION)
    _, output = layer.step(layer.initial_state(entries, queries), entries, queries, score)
    similarity, position, (metadata,) = output.retrieved.top(4)
    scores = dot_products(query, key)
    for row, count in enumerate((6, 4)):
        for cell in range(count):
            visible = [p for p in range(count) if count - 5 <= p <= cell]
            for head in range(4):
                expected = sorted(((float(scores[row, head, cell, p]), p) for p in visible), reverse=True)[:3]
                retrieved = [p for p in position[row, head, cell].tolist() if p >= 0]
                assert retrieved == [p for _, p in expected]
                torch.testing.assert_close(similarity[row, head, cell, : len(retrieved)].tolist(), [s for s, _ in expected])
                assert metadata[row, head, cell, : len(retrieved)].tolist() == document[row, retrieved].tolist()
    assert bool((metadata[1, :, 4:] == -1).all()) and bool((similarity[1, :, 4:] == -torch.inf).all()), (
        "no query, nothing retrieved"
    )
    weight = output.retrieved.similarity.softmax(-1)[0, :, 5]
    assert bool(((weight > 0).sum(-1) == 3).all())


@pytest.mark.parametrize("top_k", [2, 4, 40])
@pytest.mark.parametrize("name", ["lru", "lfu"])
def test_what_the_layer_retrieved_counts_as_used(name: str, top_k: int) -> None:
    """Of 40 entries a query uses as many as the layer's own top-k retrieves, neither 32 of them nor all."""
    torch.manual_seed(2)
    query, key, value = (torch.randn(1, 40, 1, 8).double() for _ in range(3))
    position = torch.arange(40)[None]
    layer = Attendre(BoundedMemory(40, instantiate(composed(f"eviction={name}").eviction, _convert_="all")), top_k=top_k)
    entries, queries = (key, value), Queries((query,), position)
    state, output = layer.step(layer.initial_state(entries, queries), entries, queries, score)
    retrieved = (output.retrieved.similarity > -torch.inf)[0, 0]
    assert bool((retrieved.sum(-1) == top_k).all())
    last = torch.where(retrieved, torch.arange(40)[:, None], -1).amax(0)
    expected = torch.where(last >= 0, last, torch.arange(40)) if name == "lru" else retrieved.sum(0)
    assert torch.equal(state.keys.ranking.score[0].long(), expected)
