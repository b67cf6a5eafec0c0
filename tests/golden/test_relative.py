"""T5's relative-position buckets and the sliding-window masks."""

from __future__ import annotations

import re

import torch

from tests.golden.memories import ROOT, tensors
from tests.golden.published import parametrized
from trime.layers.sliding import RelativeBias, bucket_of, in_window

T5 = tensors("t5_buckets") if (ROOT / "t5_buckets.npz").is_file() else {}
MASKS = tensors("xl_masks") if (ROOT / "xl_masks.npz").is_file() else {}


def distances(queries: int, keys: int) -> torch.Tensor:
    """Return query - key, where the queries are at the last keys' positions."""
    return torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)


def numbers(name: str) -> list[int]:
    """Return the numbers in the name of a case."""
    return [int(number) for number in re.findall(r"\d+", name)]


@parametrized("name", [name for name in T5 if name.startswith("buckets_")])
def test_buckets(name: str) -> None:
    count, longest = numbers(name)
    assert torch.equal(bucket_of(-T5["relative_position"], count, longest, causal="causal" in name), T5[name])


@parametrized("name", [name for name in MASKS if name.startswith("meliad_")])
def test_buckets_of_the_official_layer(name: str) -> None:
    count, longest = numbers(name)
    assert torch.equal(bucket_of(-MASKS["relative_position"], count, longest, causal="causal" in name), MASKS[name])


@parametrized("name", [name for name in T5 if name.startswith("matrix_")])
def test_matrices(name: str) -> None:
    (queries, keys), (count, longest) = numbers(name), T5["configs"][0].tolist()
    assert torch.equal(bucket_of(distances(queries, keys), count, longest, causal="causal" in name), T5[name])


@parametrized("shape", [tuple(shape.tolist()) for shape in MASKS.get("shapes_q_k_window", [])])
def test_masks(shape: tuple[int, int, int]) -> None:
    queries, keys, window = shape
    distance = distances(queries, keys)
    assert torch.equal(-distance, MASKS[f"relpos_q{queries}_k{keys}"])
    assert torch.equal(in_window(distance, window, itself=False), MASKS[f"mask_q{queries}_k{keys}_w{window}"])
    bias = RelativeBias(heads=1)
    bias.table.data = torch.arange(float(bias.buckets))[None]
    buckets = bias(distance)[0].long()
    assert torch.equal(buckets, MASKS[f"t5bucket_causal_q{queries}_k{keys}"])
