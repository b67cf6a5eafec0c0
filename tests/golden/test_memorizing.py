"""The kNN-augmented layer over consecutive segments (mt_*.npz): outputs, ring buffer, retrieved entries, gradients.

Not compared: the official float32 runs (``*_f32``), since their float64 runs are; and ``f32_vs_f64_maxabs``, their difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tests.golden.memories import description, tensors
from tests.golden.published import copy, parametrized
from trime.kv.bounded import MemoryState
from trime.kv.eviction.fifo import FIFO
from trime.layers import topk_attention as retrieval
from trime.layers.sliding import SlidingWindow
from trime.layers.topk_attention import Table, all_keys, bucket_top, exact_top, search
from trime.models.backbones.kv_memory import KeyValueMemory
from trime.models.backbones.memorizing import AttentionConfig, AttentionState, KNNAttention
from trime.models.backbones.stateful import StatefulTransformerLayer

META = description("mt_meta")
CASES = [name for name in META if "E" not in META[name]["config"]]
LAYERS = [name for name in META if "E" in META[name]["config"]]
ALONE = 1e9  # a gate bias that leaves only one of the two attentions


def arrays(name: str) -> dict[str, torch.Tensor]:
    """Return the published arrays of a case."""
    return tensors(f"mt_{name}")


def attention(name: str, search: str, local_empty: bool, memory_empty: bool, bias: float | None = None) -> KNNAttention:
    """Return the layer in float64, to be called without its projections."""
    config, published = META[name]["config"], arrays(name)
    heads, width = config["H"], config["H"] * config["D"]
    memory = KeyValueMemory(heads, width, config["M"], FIFO(), config["k"], search, empty_take_mass=memory_empty)
    window = SlidingWindow(config["W"], itself=False, empty_take_mass=local_empty)
    layer = KNNAttention(width, heads, 0.0, window, AttentionConfig(normalize=config.get("normalize", True)), memory).double()
    copy(layer.bias.table, published["rel_embedding"])
    copy(memory.bias, published["memory_bias"] if bias is None else torch.full((heads,), bias))
    if layer.scale is not None:
        copy(layer.scale, published["attention_scale"])
    return layer


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """Return x [b l h d] as [b h l d] in float64."""
    return x.double().transpose(1, 2)


class Step(NamedTuple):
    """The layer's output for a segment, and its memory before and after it."""

    number: int
    inputs: tuple[torch.Tensor, ...]
    out: torch.Tensor
    before: MemoryState
    after: MemoryState


def steps(name: str, layer: KNNAttention) -> Iterator[Step]:
    """Yield the segments in order; only the last one has a gradient."""
    published, config = arrays(name), META[name]["config"]
    state = layer.initial_state(config["B"])
    for number, fresh in enumerate(published["start_of_sequence"]):
        inputs = tuple(heads_first(published[key][number]) for key in ("q_raw", "k_raw", "v"))
        if number + 1 == config["n"]:
            inputs = tuple(part.requires_grad_() for part in inputs)
        before = layer.reset(state, fresh)
        position = torch.arange(number * config["T"], (number + 1) * config["T"]).expand(config["B"], -1)
        x = inputs[0].transpose(1, 2).flatten(2)
        out, state = layer.attend(x, inputs, before, position)
        memories = (layer.memory.with_pending(attention_state.memory[0]) for attention_state in (before, state))
        yield Step(number, inputs, out.transpose(1, 2), *memories)


VARIANTS = {  # array: search, whether empty slots of cache and memory take mass, gate bias
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
    published = arrays(name)
    gate = published["memory_bias"].double().sigmoid()[:, None]
    for step in steps(name, attention(name, "exact", False, False)):
        mixed = (1 - gate) * published["local_xlmask"][step.number] + gate * published["ext_exact_masked"][step.number]
        torch.testing.assert_close(step.out, mixed, rtol=0, atol=1e-12)


@parametrized("name", CASES)
def test_the_ring(name: str) -> None:
    """Compare the ring buffer slot by slot, the number of written entries, and their positions."""
    published = arrays(name)
    for number, _, _, _, entries in steps(name, attention(name, "exact", True, True)):
        for column, key in zip(entries.columns, ("mem_keys", "mem_values"), strict=True):
            torch.testing.assert_close(column.transpose(1, 2).float(), published[key][number], rtol=0, atol=1e-6)
        assert torch.equal(entries.ranking.position, published["mem_src"][number])
        assert torch.equal(
            entries.ranking.written[:, None].expand_as(published["db_index"][number]), published["db_index"][number]
        )


@parametrized("name", CASES)
def test_what_is_retrieved(name: str) -> None:
    published, config = arrays(name), META[name]["config"]
    layer = attention(name, "exact", True, True)
    for step in steps(name, layer):
        (query, _), _ = layer.normalize_and_scale(step.inputs[0], step.inputs[1])
        table = Table(*step.before.columns, step.before.ranking.position >= 0)
        position = step.before.ranking.position
        for top, array in ((exact_top, "top_exact"), (bucket_top, "top_approx")):
            if array in published:
                slot = search(query, all_keys(table), config["k"], top).slot
                source = position[torch.arange(config["B"])[:, None, None, None], slot].transpose(1, 2)
                expected = published[array][step.number]
                both = (source, expected) if top is exact_top else (source.sort(-1)[0], expected.sort(-1)[0])
                assert torch.equal(*both)


@parametrized("name", CASES)
def test_gradients(name: str) -> None:
    """Gradients of the last segment: neither the search nor stored entries have one, the queries do."""
    published, layer = arrays(name), attention(name, *VARIANTS["out_official"])
    *_, last = steps(name, layer)
    loss = (last.out * published["cotangent"].double()).sum()
    loss.backward()
    assert abs(float(loss) - float(published["loss"])) < 1e-10
    for part, key in zip(last.inputs, ("grad_q_raw", "grad_k_raw", "grad_v"), strict=True):
        torch.testing.assert_close(part.grad.transpose(1, 2), published[key], rtol=0, atol=1e-11)
    parameters = {
        "grad_memory_bias": layer.memory.bias,
        "grad_rel_embedding": layer.bias.table,
        "grad_attention_scale": layer.scale,
    }
    for key, parameter in parameters.items():
        if key in published:
            torch.testing.assert_close(parameter.grad.float(), published[key], rtol=1e-5, atol=2e-6)


@parametrized("name", LAYERS)
def test_the_whole_layer(name: str) -> None:
    """Compare the projections, norms and feed-forward block of the official layer."""
    published, config = arrays(name), META[name]["config"]
    options = AttentionConfig("rms", biases=False, normalize=config.get("normalize", True), head_width=config["D"])
    window = SlidingWindow(config["W"], itself=False, empty_take_mass=True)
    memory = KeyValueMemory(config["H"], config["E"], config["M"], FIFO(), config["k"], "buckets", empty_take_mass=True)
    attention = KNNAttention(config["E"], config["H"], 0.0, window, options, memory)
    layer = StatefulTransformerLayer(attention, config["E"], config["F"], norm=options.norm, biases=options.biases).double()
    load(layer, {key.removeprefix("param/"): value for key, value in published.items() if key.startswith("param/")})
    state: AttentionState = attention.initial_state(config["B"])
    for number, (x, fresh) in enumerate(zip(published["xs"], published["start_of_sequence"], strict=True)):
        position = torch.arange(number * config["T"], (number + 1) * config["T"]).expand(config["B"], -1)
        y, _, state = layer(x.double(), attention.reset(state, fresh), position)
        torch.testing.assert_close(y, published["ys"][number], rtol=0, atol=2e-6)  # its norms run in float32
    keys = attention.memory.with_pending(state.memory[0]).columns[0].transpose(1, 2).float()
    torch.testing.assert_close(keys, published["final_mem_keys"], rtol=0, atol=2e-6)


def load(layer: StatefulTransformerLayer, weights: dict[str, torch.Tensor]) -> None:
    """Copy the official layer's weights."""
    kernels = [weights[f"tbase/_kvq/{part}_layer/kernel"] for part in ("queries", "keys", "values")]
    copy(layer.attention.qkv_proj.weight, torch.cat(kernels, 1).T)
    copy(layer.attention.out_proj.weight, weights["tbase/post_attn_mlp/output_layer/kernel"].T)
    copy(layer.attention.bias.table, weights["relative_positions/rel_embedding"])
    if layer.attention.scale is not None:
        copy(layer.attention.scale, weights["tbase/_kvq/attention_scale"])
    copy(layer.attention.memory.bias, weights["external_memory_bias"])
    copy(layer.attention_norm.weight, weights["tbase/_kvq/pre_attn_layernorm/scale"])
    copy(layer.ffn_norm.weight, weights["tbase/pre_ffn_layernorm/scale"])
    copy(layer.ffn[0].weight, weights["tbase/ffn/hidden0/kernel"].T)
    copy(layer.ffn[3].weight, weights["tbase/ffn/output_layer/kernel"].T)


def test_grouped_search_is_exact(monkeypatch: Any) -> None:
    """The top of the groups contains the top of all, with ties and empty slots."""
    torch.manual_seed(0)
    score = torch.randn(2, 3, 5, 640).round(decimals=1)
    score[..., 100:230] = -torch.inf
    plain = score.topk(7, dim=-1)
    grouped = exact_top(score, 7)
    assert torch.equal(score.gather(-1, grouped), plain.values)
    monkeypatch.setattr(retrieval, "GROUP", 10**9)
    assert torch.equal(score.gather(-1, exact_top(score, 7)), plain.values)
