"""Properties of backbones with a state (Transformer-XL, Memorizing): segmentation changes nothing, no later token leaks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, composed
from trime import FIFO, LRU, Constant, LRASum, Sink
from trime.common.types import Batch
from trime.kv.bounded import BoundedMemory
from trime.kv.eviction.base import EvictionPolicy
from trime.layers.embeddings import PlainInput
from trime.layers.sliding import SlidingWindow
from trime.layers.topk_attention import Table, all_keys, exact_top, search
from trime.models.backbones.kv_memory import IVFKeyIndex, KeyValueMemory
from trime.models.backbones.memorizing import AttentionConfig, memorizing_transformer
from trime.models.backbones.srupp import srupp
from trime.models.backbones.stateful import StatefulBackbone
from trime.models.backbones.transformer_xl import transformer_xl
from trime.models.network import Reader, build_network

POLICIES = sorted(path.stem for path in (ROOT / "conf" / "eviction").glob("*.yaml"))
WORDS = 40


def model(
    size: int = 64, top_k: int = 64, gate: float = 0.0, window: int = 64, policy: EvictionPolicy | None = None
) -> StatefulBackbone:
    """Return two layers in float64, the last one with a memory."""
    torch.manual_seed(0)
    memory = partial(KeyValueMemory, size=size, policy=policy or FIFO(), top_k=top_k)
    parts = memory, SlidingWindow(window), AttentionConfig()
    backbone = memorizing_transformer(PlainInput(WORDS, 16), 2, 2, 32, 512, *parts).double()
    for attention in backbone.attentions:
        torch.nn.init.normal_(attention.bias.table)
    backbone.attentions[1].memory.bias.data.fill_(gate)
    return backbone.eval()


def xl(size: int, policy: EvictionPolicy, longest: int = 64) -> StatefulBackbone:
    """Return two layers of Transformer-XL in float64."""
    torch.manual_seed(0)
    backbone = transformer_xl(PlainInput(WORDS, 16), 2, 2, 32, 64, BoundedMemory(size, policy), longest=longest).double()
    for attention in backbone.attentions:
        for bias in (attention.content_bias, attention.position_bias):
            torch.nn.init.normal_(bias)
    return backbone.eval()


def text(rows: int, length: int) -> torch.Tensor:
    """Return rows of random tokens."""
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(1))


def read(backbone: StatefulBackbone, tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Return f of a text that is read in segments of ``size`` tokens."""
    state, outputs = None, []
    for part in tokens.split(size, dim=1):
        encoding, state = backbone(part, state, None)
        outputs.append(encoding.f)
    return torch.cat(outputs, 1)


LOCAL = [*(partial(model, gate=-1e9, window=window) for window in (5, 8, 64)), partial(xl, 64, FIFO())]


@pytest.mark.parametrize("make", LOCAL)
def test_segments_are_one_text(make: Callable[[], StatefulBackbone]) -> None:
    """A window across segments, or a long cache, equals attention over the whole text, wherever it is split."""
    backbone, tokens = make(), text(3, 48)
    expected = read(backbone, tokens, 48)
    for size in (4, 8, 16, 13):
        torch.testing.assert_close(read(backbone, tokens, size), expected, rtol=0, atol=1e-12)


def srupp_of(size: int, policy: EvictionPolicy) -> StatefulBackbone:
    """Return two layers of SRU++ in float64."""
    torch.manual_seed(0)
    backbone = srupp(PlainInput(WORDS, 16), 2, 2, 8, 64, BoundedMemory(size, policy)).double()
    for attention in backbone.attentions:
        torch.nn.init.normal_(attention.alpha)  # type: ignore[attr-defined]
    return backbone.eval()


@pytest.mark.parametrize("policy", [FIFO(), LRASum()])
@pytest.mark.parametrize("make", [xl, srupp_of, lambda size, policy: model(size, 4, 0.5, 7, policy)])
def test_a_segment_may_come_piece_by_piece(
    make: Callable[[int, EvictionPolicy], StatefulBackbone], policy: EvictionPolicy
) -> None:
    """In each segment of a text, whatever its cache or memory has seen before; the state stays that before the segment."""
    backbone, tokens, state = make(20, policy), text(2, 60), None
    for segment in tokens.split(15, dim=1):
        kept, pieces = backbone.new_cache(), []
        for piece in segment.split([1, 1, 6, 7], dim=1):
            pieces.append(backbone(piece, state, None, kept)[0])
        whole, state = backbone(segment, state, None)
        torch.testing.assert_close(torch.cat([piece.f for piece in pieces], 1), whole.f, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat([piece.g for piece in pieces], 1), whole.g, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"positions=(64|512)"):
        backbone(text(2, 600), None, None, backbone.new_cache())


def test_a_window_is_no_longer_than_it_says() -> None:
    """Two layers see twice the window: an earlier token changes nothing."""
    backbone, tokens = model(gate=-1e9, window=6), text(1, 40)
    before, changed = read(backbone, tokens, 8), tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % WORDS
    moved = (read(backbone, changed, 8) - before).abs().amax(-1)[0] > 1e-12
    assert moved[10:21].any() and not moved[:10].any() and not moved[21:].any()


@pytest.mark.parametrize("size", [5, 8, 20])
def test_shifted_rows_and_looked_up_distances_agree(size: int) -> None:
    """FIFO and a sink of size 0 keep the same entries: one is read by shifting, the other by looking up distances."""
    tokens = text(2, 40)
    one, other = (read(xl(size, policy), tokens, 8) for policy in (FIFO(), Sink(0)))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_relative_attention_is_the_papers_sum() -> None:
    """Compare with the four terms of every query and key, computed from the formula (Dai et al. 2019, 3.3)."""
    attention = xl(6, FIFO()).attentions[0]
    torch.manual_seed(5)
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    _, state = attention(x[:, :5], attention.initial_state(1), torch.arange(5)[None])
    output, _ = attention(x[:, 5:], state, torch.arange(5, 9)[None])
    expected = torch.zeros(4, 16, dtype=torch.float64)
    key, value = attention.kv_proj(x[0]).chunk(2, -1)
    for i in range(5, 9):
        for head in range(2):
            part = slice(8 * head, 8 * head + 8)
            query = attention.q_proj(x[0, i])[part]
            scores = []
            for j in range(i + 1):
                distant = attention.r_proj(attention.sinusoids[i - j])[part]
                u, v = attention.content_bias[head, 0], attention.position_bias[head, 0]
                scores.append((query @ key[j, part] + query @ distant + u @ key[j, part] + v @ distant) / 8**0.5)
            expected[i - 5, part] = torch.stack(scores).softmax(0) @ value[: i + 1, part]
    torch.testing.assert_close(output[0], attention.out_proj(expected), rtol=0, atol=1e-12)


PER_HEAD = ["model.backbone.memory.top_k=4", "model.backbone.memory.per_head=true"]
FAISS = [f"model.backbone.memory.{setting}" for setting in ("top_k=4", "search=faiss", "candidates=16")]
CHOSEN = ("top_k=4", "search=approximate", "candidates=16", "observation_queries=4")
APPROXIMATE = [f"model.backbone.memory.{setting}" for setting in CHOSEN]
CONTENT_GATE = ["model.backbone.memory.top_k=4", "model.backbone.memory.gate=content"]


MODELS = [("memorizing", CONTENT_GATE), ("transformer_xl", []), ("srupp", [])]
COMBINATIONS = [
    *((policy, "memorizing", PER_HEAD) for policy in POLICIES),
    *((policy, *model) for policy in ("fifo", "lra_sum", "snapkv") for model in MODELS),
    *((policy, "memorizing", more) for policy in ("fifo", "lru") for more in (APPROXIMATE, FAISS)),
]


@pytest.mark.parametrize("policy, backbone, more", COMBINATIONS)
def test_no_later_token_and_no_other_row_moves_anything(policy: str, backbone: str, more: list[str]) -> None:
    """This holds with any policy; and a row that starts a document forgets the last one."""
    window = ["train.eviction.window=7"] if policy == "snapkv" else []  # by default more than the memory holds
    options = (f"eviction@train.eviction={policy}", "train.memory_size=20", *window, *more)
    config = composed(f"experiment={backbone}", "size=tiny", *options)
    torch.manual_seed(0)
    backbone = build_network(config.model, WORDS).double().eval().backbone  # type: ignore[assignment]
    tokens = text(2, 64)
    before, changed = read(backbone, tokens, 8), tokens.clone()
    changed[1], changed[0, 40] = changed[1].flip(0), (changed[0, 40] + 1) % WORDS
    after = read(backbone, changed, 8)
    assert torch.equal(after[0, :40], before[0, :40]) and not torch.equal(after[0, 40:], before[0, 40:])
    state = None
    for part in tokens.split(8, dim=1):
        _, state = backbone(part, state, None)
    fresh, _ = backbone(tokens[:, :8], state, torch.tensor([True, False]))
    assert torch.equal(fresh.f[0], before[0, :8]) and not torch.equal(fresh.f[1], before[1, :8])


@pytest.mark.parametrize("policy", [FIFO(), LRU(Constant(0.0), 2)])
def test_a_state_may_be_read_again(policy: EvictionPolicy) -> None:
    """New entries are written into the state's tensors in place, the same ones each time."""
    backbone, parts = model(size=12, top_k=4, policy=policy), text(2, 40).split(8, dim=1)
    state = None
    for part in parts:
        (once, _), (again, after) = backbone(part, state, None), backbone(part, state, None)
        assert torch.equal(once.f, again.f)
        state = after
    torch.testing.assert_close(once.f, read(backbone, torch.cat(parts, 1), 8)[:, -8:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [{}, {"per_head": True}])
def test_approximate_search_is_exact_where_all_are_candidates(heads: dict[str, bool]) -> None:
    tokens, outputs = text(2, 96), []
    approximate: dict[str, Any] = {"search": "approximate", "candidates": 63}
    few = approximate | {"candidates": 20, "observation_queries": 3}
    for more in ({}, approximate, few, {"search": "faiss", "candidates": 64}):
        torch.manual_seed(0)
        memory = partial(KeyValueMemory, size=64, policy=FIFO(), top_k=4, **heads, **more)
        parts = (memory, SlidingWindow(8), AttentionConfig())
        backbone = memorizing_transformer(PlainInput(WORDS, 16), 2, 2, 32, 512, *parts).double().eval()
        outputs.append(read(backbone, tokens, 8))
    exact, near, fewer, faiss = outputs
    torch.testing.assert_close(faiss, exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(fewer[:, :24], exact[:, :24], rtol=0, atol=1e-12)  # few entries: all are candidates
    assert not torch.allclose(fewer, exact) and (near - exact).abs().max() < (fewer - exact).abs().max()


def test_cells_follow_a_table_that_is_written_to() -> None:
    """With all cells visited, FAISS retrieves what exact search does after any writes; with few cells, less."""
    torch.manual_seed(4)
    table = Table(*torch.zeros(2, 2, 400, 3, 8).unbind(0), torch.zeros(2, 400).bool())
    full, partial_index, recalls = IVFKeyIndex(400), IVFKeyIndex(40), []
    for step in range(30):
        slots = (torch.arange(100) + 50 * step) % 400  # some are written for the first time, some again
        table.key[:, slots], table.filled[:, slots] = torch.randn(2, 100, 3, 8), True
        if step == 20:
            table.key[1], table.filled[1] = 0, False
        query = torch.randn(2, 3, 5, 8)
        exact = search(query, all_keys(table), 4, exact_top)
        found, fewer = (index.search(query, table, 4) for index in (full, partial_index))
        filled = table.filled.any(1)
        assert torch.equal(exact.slot[filled], found.slot[filled])
        torch.testing.assert_close(exact.product, found.product.clamp(min=-1e3), rtol=0, atol=1e-5)
        torch.testing.assert_close(IVFKeyIndex(400).search(query, table, 4).slot[filled], found.slot[filled])
        recalls.append((exact.slot[0, ..., None] == fewer.slot[0, ..., None, :]).any(-1).float().mean())
    assert recalls[0] == 1 and 0.3 < torch.stack(recalls[10:]).mean() < 1  # a table with few entries is searched exactly


@pytest.mark.parametrize("name", ["memorizing", "transformer_xl"])
def test_a_memory_of_size_0_is_one_that_is_always_empty(name: str) -> None:
    tokens = text(2, 24)
    empty, cleared = (model(size) if name == "memorizing" else xl(size, LRU(Constant(0.0), 2)) for size in (0, 64))
    state, outputs = None, []
    for part in tokens.split(8, dim=1):
        encoding, state = cleared(part, state, None)
        outputs.append(encoding.f)
        both, layers = torch.ones(2, dtype=torch.bool), list(state.layers)
        for number, attention in enumerate(cleared.attentions):
            if name == "transformer_xl":
                layers[number] = attention.reset(layers[number], both)
            elif attention.memory is not None:
                layers[number] = layers[number]._replace(memory=(attention.memory.reset(layers[number].memory[0], both),))
        state = state._replace(layers=tuple(layers))
    torch.testing.assert_close(read(empty, tokens, 8), torch.cat(outputs, 1), rtol=0, atol=1e-12)
    assert not torch.allclose(read(empty, tokens, 8), read(cleared, tokens, 8))


@pytest.mark.parametrize(
    "experiment, policy", [*(("memorizing", policy) for policy in POLICIES), ("transformer_xl", "lra_sum"), ("srupp", "fifo")]
)
def test_half_precision_reads_and_learns(experiment: str, policy: str) -> None:
    """As with mixed precision on a GPU: activations in bfloat16, memories and the search in float32."""
    window = ["train.eviction.window=7"] if policy == "snapkv" else []  # by default more than the memory holds
    options = (f"eviction@train.eviction={policy}", "train.memory_size=32", *window)
    network = build_network(composed(f"experiment={experiment}", "size=tiny", *options).model, WORDS)
    state, tokens = None, text(2, 48)
    for part in tokens.split(16, dim=1):
        with torch.autocast("cpu", torch.bfloat16):
            encoding, state = network.backbone(part, state, None)
            loss = encoding.f.float().square().mean()
        loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())


def test_a_reader_goes_on_from_what_it_saved() -> None:
    network = build_network(composed("experiment=memorizing", "size=tiny").model, WORDS).eval()
    tokens, zero = text(2, 48), torch.zeros(2, dtype=torch.long)
    unbroken, restored = Reader(network), Reader(network)
    for start in range(0, 48, 16):
        part = tokens[:, start : start + 16]
        fresh = torch.full((2,), start == 0)
        batch = Batch(part, part, zero + 16, part >= 0, zero, zero, zero + start, fresh)
        expected = unbroken.encode(batch)
        assert torch.equal(restored.encode(batch).f, expected.f)
        restored = Reader(network)
        restored.restore(unbroken.state_tensors(), torch.device("cpu"))
