"""Attendre attention against the golden folder: outputs, what was visible, and the step at which each query attended.

Parameters come from ``attendre_layer.json``; the bias of pairs stands for what a model's positions add.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.golden.memories import description, tensors
from tests.golden.policies import policy_of
from tests.golden.published import parametrized
from trime.memory.bounded import BoundedMemory
from trime.models import attendre
from trime.models.attendre import Attendre, AttendreState, AttentionOutput, Queries
from trime.models.layers.rotary import Rotary, RotaryScore

RUNS = description("attendre_layer")
INFINITE = description("lm_infinite")


class Run:
    """A run over the stream, and what became of every query."""

    def __init__(self, given: dict[str, Any]):
        assert not given["per_head"], "the layer keeps one set of entries for all heads"
        found = tensors("attendre_layer")
        self.query, self.key, self.value = (found[f"in/{name}"].double().transpose(1, 2) for name in "qkv")
        self.bias, self.valid = found["in/bias"], found["in/valid"]
        keys = BoundedMemory(given["M"], policy_of(given))
        self.layer = Attendre(keys, given["N"], given["retrieve_topk"], given["mask"] == "causal")
        self.out = torch.full_like(self.query, torch.nan)
        self.step_of_query = torch.full(self.valid.shape, -1)
        self.visible = torch.zeros(*self.valid.shape, self.valid.shape[1], dtype=torch.bool)
        state = self.layer.start((self.key, self.value), self.queries(slice(0, 0)))
        ranges = found["in/insert_range"].tolist()
        for number, (low, high) in enumerate(ranges):
            chunk = slice(low, high)
            state, left = self.layer.step(state, (self.key[:, chunk], self.value[:, chunk]), self.queries(chunk), self.score)
            self.note(number, left, state)
        chunk_size = ranges[0][1] - ranges[0][0]
        count = given["N"] if given["finish"] == "flush" else chunk_size
        for number in range(len(ranges), len(ranges) + -(-given["N"] // max(count, 1))):
            state, left = self.layer.release(state, count, self.score)
            self.note(number, left, state)

    def queries(self, chunk: slice) -> Queries:
        """Queries, and the same once more as what waits along."""
        position = torch.arange(self.valid.shape[1])[chunk].expand(len(self.valid), -1)
        return Queries((self.query[:, chunk], self.query[:, chunk]), position.masked_fill(~self.valid[:, chunk], -1))

    def score(self, query: torch.Tensor, at: torch.Tensor, key: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        bias = self.bias[:, at.clamp(min=0)[:, :, None], of.clamp(min=0)[:, None]].transpose(0, 1)
        return query.transpose(1, 2) @ key.permute(0, 2, 3, 1) / query.shape[-1] ** 0.5 + bias

    def note(self, number: int, left: AttentionOutput, state: AttendreState) -> None:
        for row, places in enumerate(left.position):
            there = places >= 0
            self.out[row, places[there]] = left.attended[row, there]
            assert torch.equal(left.payload[0][row, there], self.query[row, places[there]]), (
                "what waits along stays with its query"
            )
            self.step_of_query[row, places[there]] = number
            held = state.keys.ranking.position[row]
            seen = self.layer.visible(places[None], held[None])[0, 0][there][:, held >= 0]
            self.visible[row, places[there][:, None], held[held >= 0]] = seen


@parametrized("name", list(RUNS))
def test_a_layer(name: str) -> None:
    run, found = Run(RUNS[name]), tensors("attendre_layer")
    torch.testing.assert_close(run.out.transpose(1, 2), found[f"{name}/out"], rtol=0, atol=1e-12, equal_nan=True)
    assert torch.equal(run.visible, found[f"{name}/visible"])
    assert torch.equal(run.step_of_query, found[f"{name}/step_of_query"])
    assert bool(found[f"{name}/visible"].any()) and attendre.retrieval_mask(torch.zeros(1, 1, 1, 3), 3, "exact") is None


@parametrized("name", list(INFINITE["cases"]))
def test_lm_infinite(name: str) -> None:
    """Distances are real up to the length of pretraining, and capped beyond (Attendre section 4)."""
    given, found = INFINITE["cases"][name], tensors("lm_infinite")
    query_at, key_at = (found[f"{name}/{which}_pos"] for which in ("query", "key"))
    query, key, value = (found[part].double().transpose(0, 1)[None] for part in "qkv")
    if len(key_at) < key.shape[1]:  # some queries and the keys that a memory kept
        rows, kept = (found[f"{subset_of(name)}/{which}_index"] for which in ("query", "kept_key"))
        query, key, value = query[:, rows], key[:, kept], value[:, kept]
    form = Rotary.of(given.get("dim", INFINITE["D"]), given["base"], given.get("style") == "interleaved")
    capped = RotaryScore(form, given["L"], given.get("future", "signed"))
    logits = capped(query, query_at[None], key, key_at[None])[0]
    after = replace(capped, stored_rotated=True)
    turned = after.stored(key, key_at[None])
    torch.testing.assert_close(after(query, query_at[None], turned, key_at[None])[0], logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(logits, found[f"{name}/scores"], rtol=0, atol=1e-12)
    out = logits.masked_fill(~found[f"{name}/allow"], -torch.inf).softmax(-1) @ value[0].transpose(0, 1)
    torch.testing.assert_close(out, found[f"{name}/out"], rtol=0, atol=1e-12)
    near = found[f"{name}/used_distance"].abs() < given["L"]
    plain = RotaryScore(form)(query, query_at[None], key, key_at[None])[0]
    torch.testing.assert_close(logits[:, near], plain[:, near], rtol=0, atol=1e-12)


def subset_of(name: str) -> str:
    """Return the case that lists the entries of a case: itself, or one of its shape, rather one whose name it continues."""
    arrays = tensors("lm_infinite")
    listed = [case for case in INFINITE["cases"] if f"{case}/kept_key_index" in arrays]
    alike = [case for case in listed if arrays[f"{case}/allow"].shape == arrays[f"{name}/allow"].shape]
    return name if name in alike else max(alike, key=lambda case: name.startswith(case))
