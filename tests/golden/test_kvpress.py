"""Policies and shares of room against kvpress 0.5.5, on random prompts (scripts/kvpress_vectors.py).

kvpress takes the mean over the heads of queries that share a head of keys, where a policy takes the sum.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trime.common.types import Ranking
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.kv.budgets import AdaKV, pyramid
from trime.kv.eviction.base import EvictionPolicy
from trime.kv.eviction.kvzip import KVzip
from trime.kv.eviction.snapkv import SnapKV
from trime.kv.layer_memory import Columns, LayerMemory
from trime.layers.rotary import Rotary

FOLDER = Path(__file__).parent / "kvpress"
SETTINGS = json.loads((FOLDER / "settings.json").read_text())
with np.load(FOLDER / "prompts.npz") as file:
    ARRAYS = {name: torch.from_numpy(file[name]) for name in file.files}
TEXTS, HEADS, LENGTH, WIDTH = ARRAYS["key"].shape
GROUP = ARRAYS["query"].shape[1] // HEADS  # heads of queries that share one of keys
ROTARY = Rotary.of(WIDTH, SETTINGS["theta"])
POSITIONS = torch.arange(LENGTH).expand(TEXTS, -1)


def columns(first: int, last: int) -> Columns:
    """Return the queries, rotated, the keys and the values [b l h d] of some tokens of the prompts."""
    query, key, value = (ARRAYS[name].transpose(1, 2) for name in ("query", "key", "value"))
    query = ROTARY.rotate(query, POSITIONS)
    return query[:, first:last], key[:, first:last], value[:, first:last]


def layer_of(policy: EvictionPolicy, first: int, last: int) -> LayerMemory:
    """Return a memory that has read some tokens in one step, each head of keys for itself."""
    layer = LayerMemory(Attendre(BoundedMemory(last - first, policy), causal=True), LENGTH, heads=HEADS)
    layer.read(columns(first, last), POSITIONS[:, first:last], False, None)
    return layer


def assert_scores(ranking: Ranking, scores: torch.Tensor, expected: torch.Tensor) -> None:
    """Entries lie in their order; those that always stay have other scores, above all."""
    assert torch.equal(ranking.position, torch.arange(scores.shape[1]).expand_as(scores))
    ranked = scores < torch.inf
    assert 0 < int((~ranked).sum()) < scores.numel()
    torch.testing.assert_close(
        scores[ranked], expected.flatten(0, 1)[ranked], rtol=1e-6, atol=1e-8
    )  # a press may take its softmax in float32


def test_scores_and_shares_of_heads() -> None:
    policy, kept = SnapKV(**SETTINGS["snapkv"]), SETTINGS["kept"]
    ranking = layer_of(policy, 0, LENGTH).state.ranking
    scores = policy.compete(ranking.position, ranking.score, kept)
    assert_scores(ranking, scores / GROUP, ARRAYS["snapkv/scores"])
    for text, of_text in enumerate(scores.split(HEADS)):
        (shares,) = AdaKV(**SETTINGS["ada_kv"])([of_text], [kept])
        for share, of_head, expected in zip(shares, of_text, ARRAYS[f"snapkv/kept of {text}"], strict=True):
            assert torch.equal(of_head.topk(share).indices.sort().values, expected.nonzero()[:, 0])


def test_scores_of_a_text_that_is_repeated() -> None:
    context, kept, sinks = SETTINGS["kvzip"].values()
    layer = layer_of(KVzip(sinks=sinks), 0, context)
    larger = layer.with_room(LENGTH - context)
    larger.read(columns(context, LENGTH), POSITIONS[:, context:], False, None)
    layer.take_scores(larger)
    ranking = layer.state.ranking
    assert_scores(ranking, ranking.score, ARRAYS["kvzip/scores"])
    for text, of_text in enumerate(ranking.score.split(HEADS)):
        (shares,) = AdaKV(0.0)([of_text], [kept])
        assert shares == ARRAYS[f"kvzip/kept of {text}"].sum(1).tolist()


@pytest.mark.parametrize("case", SETTINGS["pyramids"])
def test_sizes_of_layers(case: dict[str, Any]) -> None:
    """Where the last layer would keep less than the window, all layers are alike in kvpress, and not here."""
    kept = case["length"] * (1 - case["ratio"])
    sizes = pyramid(kept, case["layers"], case["beta"], longest=case["length"] - case["window"])
    if len({*case["budgets"]}) == 1:
        assert min(sizes) < case["window"]
    else:
        assert sizes == case["budgets"]
