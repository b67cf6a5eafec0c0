"""Policies of other papers keep what their formulas say, and what kvpress keeps of the same tensors where it is installed."""

from __future__ import annotations

import pytest
import torch
from hydra.utils import instantiate

from tests.conftest import composed
from trime.common.types import Tensor
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory, MemoryState, keep_mask
from trime.kv.eviction.base import EvictionPolicy
from trime.kv.layer_memory import DotProducts, LayerMemory
from trime.layers.rotary import dot_products

LENGTH, KEPT, HEADS, WIDTH = 30, 11, 3, 8


WINDOW, KERNEL = 4, 3  # of SnapKV


def policy_of(name: str) -> EvictionPolicy:
    sizes = {"window": WINDOW, "kernel": KERNEL} if name == "snapkv" else {}
    return instantiate(composed(f"eviction={name}").eviction, **sizes, _convert_="all")


def prompt(seed: int) -> dict[str, Tensor]:
    """Return queries, keys and values of a prompt with one head of keys, and its causal attention weights [1 h l l]."""
    torch.manual_seed(seed)
    query, key, value = (torch.randn(1, LENGTH, heads, WIDTH, dtype=torch.float64) for heads in (HEADS, 1, 1))
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    weight = dot_products(query, key).masked_fill(later, -torch.inf).softmax(-1)
    return {"query": query, "key": key, "value": value, "weight": weight}


def read(policy: EvictionPolicy, given: dict[str, Tensor], chunk: int, size: int | None = None) -> MemoryState:
    """Return a memory with room for all, or for ``size`` entries, that has read the prompt in chunks."""
    layer = LayerMemory(Attendre(BoundedMemory(size or LENGTH, policy), causal=True), chunk, DotProducts())
    for start in range(0, LENGTH, chunk):
        query, key, value = (given[name][:, start : start + chunk] for name in ("query", "key", "value"))
        layer.step((query, key, value), torch.arange(LENGTH)[None, start : start + chunk])
    return layer.state


def kept(policy: EvictionPolicy, state: MemoryState) -> set[int]:
    """Return the positions that stay when the memory is cut to KEPT entries."""
    position = state.ranking.position
    score = policy.compete(position, state.ranking.score, KEPT)
    return set(position[keep_mask(position, score, KEPT, policy.newest_first)].tolist())


@pytest.mark.parametrize("chunk", [LENGTH, 7])
@pytest.mark.parametrize("seed", range(3))
def test_formulas(seed: int, chunk: int) -> None:
    """However the prompt is cut into chunks; H2O keeps half of its slots for the newest entries."""
    given = prompt(seed)
    weight, newest = given["weight"][0], torch.arange(LENGTH)
    heavy = weight.sum((0, 1)).masked_fill(newest >= LENGTH - round(KEPT / 2), torch.inf)
    last = weight[:, -1].sum(0).masked_fill(newest == LENGTH - 1, torch.inf)
    small = (-given["key"][0].flatten(1).norm(dim=1)).masked_fill(newest == LENGTH - 1, torch.inf)
    queries = min(WINDOW, LENGTH % chunk or chunk)  # of the last step
    mean = weight[:, -queries:].mean((0, 1))[: LENGTH - WINDOW]
    smooth = torch.nn.functional.pad(mean, (KERNEL // 2, KERNEL // 2)).unfold(0, KERNEL, 1).mean(-1)
    snap = torch.cat([smooth, smooth.new_full((WINDOW,), torch.inf)])
    for name, score in (("h2o", heavy), ("tova", last), ("key_norm", small), ("snapkv", snap)):
        policy = policy_of(name)
        assert kept(policy, read(policy, given, chunk)) == {*score.topk(KEPT).indices.tolist()}, name


@pytest.mark.parametrize("seed", range(3))
def test_snapkv_evicts_nothing_that_no_query_has_judged(seed: int) -> None:
    """The newest entries of one chunk are still there after the next, whose queries score them."""
    chunk = WINDOW + 1
    state = read(policy_of("snapkv"), prompt(seed), chunk, 2 * chunk)
    last = (LENGTH - 1) // chunk * chunk  # where the last chunk begins
    assert {*range(last - WINDOW, LENGTH)} <= {*state.ranking.position[0].tolist()}
