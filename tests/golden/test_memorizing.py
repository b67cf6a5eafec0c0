"""The kNN-augmented layer over consecutive segments (mt_*.npz): outputs, ring, retrieved entries, gradients.

Not compared: the official float32 runs (``*_f32``), whose float64 runs are; ``f32_vs_f64_maxabs``, which tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tests.golden.memories import description, tensors
from tests.golden.published import copy, parametrized
from trime.eviction.fifo import FIFO
from trime.memory.bounded import MemoryState
from trime.models.backbones.memorizing.kv_memory import KeyValueMemory
from trime.models.backbones.memorizing.transformer import Attention, AttentionConfig, AttentionState
from trime.models.backbones.stateful import Layer, LayerSizes
from trime.models.layers import topk_attention as retrieval
from trime.models.layers.relative import in_window
from trime.models.layers.sliding import Window
from trime.models.layers.topk_attention import Table, all_keys, bucket_top, exact_top, search

META = description("mt_meta")
CASES = [name for name in META if "E" not in META[name]["config"]]
LAYERS = [name for name in META if "E" in META[name]["config"]]
ALONE = 1e9  # a bias of the gate that leaves one of the two attentions


def arrays(name: str) -> dict[str, torch.Tensor]:
    return tensors(f"mt_{name}")


def attention(name: str, search: str, local_empty: bool, memory_empty: bool, bias: float | None = None) -> Attention:
    """The layer without its projections, in float64."""
    given, found = META[name]["config"], arrays(name)
    heads, width = given["H"], given["H"] * given["D"]
    memory = KeyValueMemory(heads, width, given["M"], FIFO(), given["k"], search, empty_take_mass=memory_empty)
    window = Window(given["W"], itself=False, empty_take_mass=local_empty)
    layer = Attention(width, heads, 0.0, window, AttentionConfig(normalize=given.get("normalize", True)), memory).double()
    copy(layer.bias.table, found["rel_embedding"])
    copy(memory.bias, found["memory_bias"] if bias is None else torch.full((heads,), bias))
    if layer.scale is not None:
        copy(layer.scale, found["attention_scale"])
    return layer


def heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.double().transpose(1, 2)


class Step(NamedTuple):
    """What the layer made of a segment, and its memory before and after."""

    number: int
    inputs: tuple[torch.Tensor, ...]
    out: torch.Tensor
    before: MemoryState
    after: MemoryState


def steps(name: str, layer: Attention) -> Iterator[Step]:
    """The segments in order; the last one with gradient."""
    found, given = arrays(name), META[name]["config"]
    carried = layer.start(given["B"])
    for number, fresh in enumerate(found["start_of_sequence"]):
        inputs = tuple(heads_first(found[key][number]) for key in ("q_raw", "k_raw", "v"))
        if number + 1 == given["n"]:
            inputs = tuple(part.requires_grad_() for part in inputs)
        before = layer.reset(carried, fresh)
        position = torch.arange(number * given["T"], (number + 1) * given["T"]).expand(given["B"], -1)
        x = inputs[0].transpose(1, 2).flatten(2)
        out, carried = layer.attend(x, inputs, before, position)
        held = (layer.memory.with_pending(state.memory[0]) for state in (before, carried))
        yield Step(number, inputs, out.transpose(1, 2), *held)


VARIANTS = {  # array: search, empty places of the cache and of the memory take mass, which attention is left
    "out_official": ("buckets", True, True, None),
    "local": ("exact", True, False, -ALONE),
    "local_xlmask": ("exact", False, False, -ALONE),
    "ext_approx": ("buckets", False, True, ALONE),
    "ext_exact_zero": ("exact", False, True, ALONE),
    "ext_exact_masked": ("exact", False, False, ALONE),
}


@parametrized("name, array", [(name, array) for name in CASES for array in VARIANTS])
def test_outputs(name: str, array: str) -> None:
    expected = arrays(name)[array]
    for step in steps(name, attention(name, *VARIANTS[array])):
        torch.testing.assert_close(step.out, expected[step.number], rtol=0, atol=1e-12)


@parametrized("name", CASES)
def test_the_gate_mixes_any_pair(name: str) -> None:
    """out = (1 - g) local + g memory, also while the memory is empty."""
    found = arrays(name)
    gate = found["memory_bias"].double().sigmoid()[:, None]
    for step in steps(name, attention(name, "exact", False, False)):
        mixed = (1 - gate) * found["local_xlmask"][step.number] + gate * found["ext_exact_masked"][step.number]
        torch.testing.assert_close(step.out, mixed, rtol=0, atol=1e-12)


@parametrized("name", CASES)
def test_the_ring(name: str) -> None:
    """Contents slot by slot, how many were written, and where they came from."""
    found = arrays(name)
    for number, _, _, _, held in steps(name, attention(name, "exact", True, True)):
        for column, key in zip(held.columns, ("mem_keys", "mem_values"), strict=True):
            torch.testing.assert_close(column.transpose(1, 2).float(), found[key][number], rtol=0, atol=1e-6)
        assert torch.equal(held.ranking.position, found["mem_src"][number])
        assert torch.equal(held.ranking.written[:, None].expand_as(found["db_index"][number]), found["db_index"][number])


@parametrized("name", CASES)
def test_what_is_retrieved(name: str) -> None:
    found, given = arrays(name), META[name]["config"]
    layer = attention(name, "exact", True, True)
    for step in steps(name, layer):
        (query, _), _ = layer.normalize_and_scale(step.inputs[0], step.inputs[1])
        table = Table(*step.before.columns, step.before.ranking.position >= 0)
        position = step.before.ranking.position
        for top, array in ((exact_top, "top_exact"), (bucket_top, "top_approx")):
            if array in found:
                slot = search(query, all_keys(table), given["k"], top).slot
                source = position[torch.arange(given["B"])[:, None, None, None], slot].transpose(1, 2)
                expected = found[array][step.number]
                both = (source, expected) if top is exact_top else (source.sort(-1)[0], expected.sort(-1)[0])
                assert torch.equal(*both)


@parametrized("name", CASES)
def test_gradients(name: str) -> None:
    """Of the last segment: neither the search nor stored entries have one, the queries do."""
    found, layer = arrays(name), attention(name, *VARIANTS["out_official"])
    *_, last = steps(name, layer)
    loss = (last.out * found["cotangent"].double()).sum()
    loss.backward()
    assert abs(float(loss) - float(found["loss"])) < 1e-10
    for part, key in zip(last.inputs, ("grad_q_raw", "grad_k_raw", "grad_v"), strict=True):
        torch.testing.assert_close(part.grad.transpose(1, 2), found[key], rtol=0, atol=1e-11)
    own = {"grad_memory_bias": layer.memory.bias, "grad_rel_embedding": layer.bias.table, "grad_attention_scale": layer.scale}
    for key, parameter in own.items():
        if key in found:
            torch.testing.assert_close(parameter.grad.float(), found[key], rtol=1e-5, atol=2e-6)


@parametrized("name", CASES)
def test_bias_and_mask(name: str) -> None:
    found, given = arrays(name), META[name]["config"]
    distance = torch.arange(given["W"], 2 * given["W"])[:, None] - torch.arange(2 * given["W"])
    assert torch.equal(in_window(distance, given["W"], itself=False), found["causal_mask"])
    bias = attention(name, "exact", True, True).bias(distance)
    torch.testing.assert_close(bias, found["rel_bias"], rtol=0, atol=1e-7)


@parametrized("name", LAYERS)
def test_the_whole_layer(name: str) -> None:
    """Projections, norms and the feed-forward block of the official layer."""
    found, given = arrays(name), META[name]["config"]
    form = AttentionConfig("rms", biases=False, normalize=given.get("normalize", True), head_width=given["D"])
    window = Window(given["W"], itself=False, empty_take_mass=True)
    memory = KeyValueMemory(given["H"], given["E"], given["M"], FIFO(), given["k"], "buckets", empty_take_mass=True)
    attention = Attention(given["E"], given["H"], 0.0, window, form, memory)
    layer = Layer(attention, LayerSizes(given["E"], given["F"]), form.norm, form.biases).double()
    load(layer, {key.removeprefix("param/"): value for key, value in found.items() if key.startswith("param/")})
    carried: AttentionState = attention.start(given["B"])
    for number, (x, fresh) in enumerate(zip(found["xs"], found["start_of_sequence"], strict=True)):
        position = torch.arange(number * given["T"], (number + 1) * given["T"]).expand(given["B"], -1)
        y, _, carried = layer(x.double(), attention.reset(carried, fresh), position)
        torch.testing.assert_close(y, found["ys"][number], rtol=0, atol=2e-6)  # its norms run in float32
    keys = attention.memory.with_pending(carried.memory[0]).columns[0].transpose(1, 2).float()
    torch.testing.assert_close(keys, found["final_mem_keys"], rtol=0, atol=2e-6)


def load(layer: Layer, weights: dict[str, torch.Tensor]) -> None:
    kernels = [weights[f"tbase/_kvq/{part}_layer/kernel"] for part in ("queries", "keys", "values")]
    copy(layer.attention.inward.weight, torch.cat(kernels, 1).T)
    copy(layer.attention.outward.weight, weights["tbase/post_attn_mlp/output_layer/kernel"].T)
    copy(layer.attention.bias.table, weights["relative_positions/rel_embedding"])
    if layer.attention.scale is not None:
        copy(layer.attention.scale, weights["tbase/_kvq/attention_scale"])
    copy(layer.attention.memory.bias, weights["external_memory_bias"])
    copy(layer.attention_norm.weight, weights["tbase/_kvq/pre_attn_layernorm/scale"])
    copy(layer.feed_norm.weight, weights["tbase/pre_ffn_layernorm/scale"])
    copy(layer.feed[0].weight, weights["tbase/ffn/hidden0/kernel"].T)
    copy(layer.feed[3].weight, weights["tbase/ffn/output_layer/kernel"].T)


def test_grouped_search_is_exact(monkeypatch: Any) -> None:
    """The top of groups holds the top of all, ties and empty slots included."""
    torch.manual_seed(0)
    score = torch.randn(2, 3, 5, 640).round(decimals=1)
    score[..., 100:230] = -torch.inf
    plain = score.topk(7, dim=-1)
    grouped = exact_top(score, 7)
    assert torch.equal(score.gather(-1, grouped), plain.values)
    monkeypatch.setattr(retrieval, "GROUP", 10**9)
    assert torch.equal(score.gather(-1, exact_top(score, 7)), plain.values)
