"""Attendre attention against the golden vectors: outputs, visible entries, and the step at which each query attended.

Parameters come from ``attendre_layer.json``; the pairwise bias stands for what a model's positions add.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.golden.memories import description, tensors
from tests.golden.policies import policy_of
from tests.golden.published import parametrized
from trime.kv import attendre
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.kv.layer_memory import LayerMemory
from trime.layers.rotary import Rotary, RotaryScore

RUNS = description("attendre_layer")
INFINITE = description("lm_infinite")


class Run:
    """A run over the stream, with the output and step of every query; also the scores, with a bias for each pair."""

    def __init__(self, config: dict[str, Any]):
        assert not config["per_head"], "the layer keeps one set of entries for all heads"
        published = tensors("attendre_layer")
        self.query, self.key, self.value = (published[f"in/{name}"].double().transpose(1, 2) for name in "qkv")
        self.bias, self.valid = published["in/bias"], published["in/valid"]
        keys = BoundedMemory(config["M"], policy_of(config))
        settings = Attendre(keys, config["N"], config["retrieve_topk"], config["mask"] == "causal")
        self.layer = LayerMemory(settings, self.valid.shape[1], self)
        self.out = torch.full_like(self.query, torch.nan)
        self.step_of_query = torch.full(self.valid.shape, -1)
        self.visible = torch.zeros(*self.valid.shape, self.valid.shape[1], dtype=torch.bool)
        ranges = published["in/insert_range"].tolist()
        every = torch.arange(self.valid.shape[1]).expand_as(self.valid).masked_fill(~self.valid, -1)
        for number, (low, high) in enumerate(ranges):
            query, key, value, position = (x[:, low:high] for x in (self.query, self.key, self.value, every))
            self.note(number, *self.layer.step((query, key, value), position))
        chunk_size = ranges[0][1] - ranges[0][0]
        count = config["N"] if config["finish"] == "flush" else chunk_size
        for number in range(len(ranges), len(ranges) + -(-config["N"] // max(count, 1))):
            self.note(number, *self.layer.release(count))

    def stored(self, key: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return key

    def __call__(self, query: torch.Tensor, at: torch.Tensor, key: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        bias = self.bias[:, at.clamp(min=0)[:, :, None], of.clamp(min=0)[:, None]].transpose(0, 1)
        return query.transpose(1, 2) @ key.permute(0, 2, 3, 1) / query.shape[-1] ** 0.5 + bias

    def note(self, number: int, attended: torch.Tensor, positions: torch.Tensor) -> None:
        """Record the outputs of a step, and what its queries could attend to."""
        for row, position in enumerate(positions):
            filled = position >= 0
            self.out[row, position[filled]] = attended[row, filled]
            self.step_of_query[row, position[filled]] = number
            stored = self.layer.positions()[row]
            visible = self.layer.memory.visible(position[None], stored[None])[0, 0][filled][:, stored >= 0]
            self.visible[row, position[filled][:, None], stored[stored >= 0]] = visible


@parametrized("name", list(RUNS))
def test_a_layer(name: str) -> None:
    run, published = Run(RUNS[name]), tensors("attendre_layer")
    torch.testing.assert_close(run.out.transpose(1, 2), published[f"{name}/out"], rtol=0, atol=1e-12, equal_nan=True)
    assert torch.equal(run.visible, published[f"{name}/visible"])
    assert torch.equal(run.step_of_query, published[f"{name}/step_of_query"])
    assert bool(published[f"{name}/visible"].any()) and attendre.retrieval_mask(torch.zeros(1, 1, 1, 3), 3, "exact") is None


@parametrized("name", list(INFINITE["cases"]))
def test_lm_infinite(name: str) -> None:
    """Distances are real up to the length of pretraining, and capped beyond (Attendre section 4)."""
    config, published = INFINITE["cases"][name], tensors("lm_infinite")
    query_at, key_at = (published[f"{name}/{which}_pos"] for which in ("query", "key"))
    query, key, value = (published[part].double().transpose(0, 1)[None] for part in "qkv")
    if len(key_at) < key.shape[1]:  # a subset of queries and keys
        query_index, key_index = (published[f"{subset_of(name)}/{which}_index"] for which in ("query", "kept_key"))
        query, key, value = query[:, query_index], key[:, key_index], value[:, key_index]
    rotary = Rotary.of(config.get("dim", INFINITE["D"]), config["base"], config.get("style") == "interleaved")
    capped = RotaryScore(rotary, config["L"], config.get("future", "signed"))
    logits = capped(query, query_at[None], key, key_at[None])[0]
    rotated = replace(capped, stored_rotated=True)
    stored = rotated.stored(key, key_at[None])
    torch.testing.assert_close(rotated(query, query_at[None], stored, key_at[None])[0], logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(logits, published[f"{name}/scores"], rtol=0, atol=1e-12)
    out = logits.masked_fill(~published[f"{name}/allow"], -torch.inf).softmax(-1) @ value[0].transpose(0, 1)
    torch.testing.assert_close(out, published[f"{name}/out"], rtol=0, atol=1e-12)
    near = published[f"{name}/used_distance"].abs() < config["L"]
    plain = RotaryScore(rotary)(query, query_at[None], key, key_at[None])[0]
    torch.testing.assert_close(logits[:, near], plain[:, near], rtol=0, atol=1e-12)


def subset_of(name: str) -> str:
    """Return the case that lists the entries of a case: itself, or one of its shape, rather one whose name it continues."""
    arrays = tensors("lm_infinite")
    listed = [case for case in INFINITE["cases"] if f"{case}/kept_key_index" in arrays]
    alike = [case for case in listed if arrays[f"{case}/allow"].shape == arrays[f"{name}/allow"].shape]
    return name if name in alike else max(alike, key=lambda case: name.startswith(case))
