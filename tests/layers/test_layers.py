"""Models, heads and attention: sizes as published, normalised, causal, block by block; kernels against plain PyTorch."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch
from torch.nn import functional as F

from tests.conftest import DEVICE, composed
from trime.common.types import Tensor
from trime.kv.eviction.base import topk_mask
from trime.layers import heads, pick_cpu
from trime.layers.attention import fused_attention
from trime.layers.attention_cpu import Reach, attend
from trime.layers.causal_blocks import BLOCKS, LONGEST, SHORTEST, CausalBlocks, worth_it
from trime.layers.embeddings import AdaptiveInput, PlainInput
from trime.layers.heads import AdaptiveSoftmax, Softmax, pick_logit
from trime.models.backbones.transformer import Transformer
from trime.models.network import build_network

# Parameter counts of the authors' classes of the released sizes.
PUBLISHED = {"wt103_247m": (267_744, 246_933_504), "wt103_150m": (267_744, 149_020_220), "enwik8_38m": (208, 38_198_272)}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    vocabulary, count = PUBLISHED[name]
    with torch.device("meta"):
        assert build_network(composed(f"model={name}").model, vocabulary).parameter_count == count


ADAPTIVE = [AdaptiveSoftmax(AdaptiveInput(20, 8, cutoffs, 2), tied) for cutoffs in ([], [5], [5, 12]) for tied in (True, False)]


@pytest.mark.parametrize("head", [*ADAPTIVE, Softmax(PlainInput(20, 8))])
def test_a_softmax_is_a_distribution_and_its_mass_agrees(head: AdaptiveSoftmax | Softmax) -> None:
    head = head.double()
    f, target = torch.randn(20, 8, dtype=torch.float64), torch.arange(20)
    log_probs = head.log_probs(f)
    assert torch.allclose(log_probs.exp().sum(1), torch.ones(20, dtype=torch.float64))
    mass = head.mass(f, target)
    assert torch.allclose(mass.target - mass.total, log_probs.diagonal())


@pytest.mark.parametrize(
    "make", [lambda: AdaptiveSoftmax(AdaptiveInput(30, 8, [6, 20], 2)), lambda: Softmax(PlainInput(30, 8))]
)
def test_blocks_change_neither_values_nor_gradients(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    head = make().double()  # type: ignore[operator]
    f, target = torch.randn(50, 8, dtype=torch.float64), torch.randint(30, (50,))
    results = []
    for cells in (2**23, 64):
        monkeypatch.setattr(heads, "LOGITS_PER_BLOCK", cells)
        own = f.clone().requires_grad_()
        head.zero_grad()
        mass = head.mass(own, target)
        (mass.target * 1.5 - mass.total).sum().backward()
        results.append([mass.target, mass.total, own.grad, *(p.grad.clone() for p in head.parameters() if p.grad is not None)])
    assert all(torch.allclose(a, b) for a, b in zip(*results, strict=True))


def test_no_later_token_and_no_other_row_moves_an_encoding() -> None:
    torch.manual_seed(2)
    model = Transformer(AdaptiveInput(20, 16, [5]), layers=2, heads=2, inner=32, positions=12).double().eval()
    tokens = torch.randint(20, (3, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 20
    one, other = model(tokens)[0], model(changed)[0]
    assert torch.equal(one.f[:, :7], other.f[:, :7]) and torch.equal(one.g[:, :7], other.g[:, :7])
    assert not torch.equal(one.f[:, 7:], other.f[:, 7:]) and torch.allclose(model(tokens[1:2])[0].f[0], one.f[1])


@pytest.mark.parametrize("rows, width", [(1, 1), (3, 70), (2, 4096), (4, 5001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kernels_are_the_definition(
    rows: int, width: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are float32's; the gradient has the logits' type."""
    if device == "cuda":
        pytest.importorskip("triton", reason="pip install triton (it comes with torch for CUDA)")
    pick = import_module(f"trime.layers.pick_{device}")
    monkeypatch.setattr(pick_cpu, "LOGITS", 9000)  # so that rows are read in parts
    torch.manual_seed(rows + width)
    logits = (8 * torch.randn(rows, width)).to(dtype)
    logits[0, width // 2] = -math.inf if width > 1 else 0.0
    index = torch.randint(width, (rows,))
    index[0] = 0
    weights = torch.randn(2, rows)
    results = []
    for kernels, of, place in [(None, torch.float64, "cpu"), (pick, dtype, DEVICE if device == "cuda" else "cpu")]:
        monkeypatch.setattr(heads, "kernels_for", lambda _, kernels=kernels: kernels)
        own = logits.to(place, of).requires_grad_()
        parts = pick_logit(own, index.to(place))
        (torch.stack(parts) * weights.to(place)).sum().backward()
        assert own.grad is not None and own.grad.dtype == of
        results.append([part.detach().cpu().double() for part in (*parts, own.grad)])
    expected, found = results
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    precision = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found[2], expected[2], rtol=precision, atol=1e-6)


ROWS, HEADS, SHARED, QUERIES, SLOTS, WIDTH = 3, 4, 2, 21, 90, 5


def parts(seed: int) -> dict[str, Tensor]:
    """Return scores, positions and values; one row has padding on both sides, another has no entry at all."""
    torch.manual_seed(seed)
    query = torch.arange(70, 70 + QUERIES).repeat(ROWS, 1)
    key = torch.stack([torch.randperm(SLOTS) for _ in range(ROWS)])
    query[1, 15:], key[1, 3:9], key[2] = -1, -1, -1
    scores, far = torch.randn(2, ROWS, HEADS, QUERIES, SLOTS) * 3
    return {"logits": scores, "far": far, "query": query, "key": key, "value": torch.randn(ROWS, SLOTS, SHARED, WIDTH)}


def expected(given: dict[str, Tensor], top_k: int | None, reach: Reach) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, retrieved entries and attended values by plain PyTorch."""
    distance = given["query"][:, :, None] - given["key"][:, None]
    visible = (given["query"] >= 0)[:, :, None] & (given["key"] >= 0)[:, None]
    if reach.causal:
        visible &= distance >= 0
    if reach.window is not None:
        visible &= distance.abs() < reach.window
    logits = given["logits"]
    if reach.longest is not None:
        logits = torch.where((distance > reach.longest)[:, None], given["far"], logits)
    logits = logits.masked_fill(~visible[:, None], -torch.inf)
    retrieved = (visible[:, None] if top_k is None else topk_mask(logits, top_k) & visible[:, None]).expand_as(logits)
    weight = logits.masked_fill(~retrieved, -torch.inf).softmax(-1).nan_to_num(0)
    value = given["value"].transpose(1, 2).repeat_interleave(HEADS // SHARED, 1)
    return logits, retrieved, weight @ value


@pytest.mark.parametrize("top_k", [1, 7, 40, SLOTS - 1, SLOTS + 5, None])
@pytest.mark.parametrize("reach", [Reach(False), Reach(True), Reach(True, 13), Reach(False, 30), Reach(True, None, 25)])
def test_attention_is_that_of_plain_pytorch(top_k: int | None, reach: Reach) -> None:
    given = parts(top_k or 0)
    logits, retrieved, values = expected(given, top_k, reach)
    own, far = given["logits"].clone(), None if reach.longest is None else given["far"]
    result = attend(own, far, given["query"], given["key"], given["value"], top_k, reach)
    assert torch.equal(own, logits)
    assert result.retrieved is None if top_k is None else torch.equal(result.retrieved, retrieved)
    torch.testing.assert_close(result.attended, values, rtol=1e-5, atol=1e-5)
    assert not result.attended[2].any() and not result.attended[1, :, 15:].any(), "nothing is seen, nothing comes back"


@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_of_equal_scores_as_many_count_as_asked_for(top_k: int) -> None:
    """Also where neighbouring queries have nothing in common, so that guesses fail."""
    given = parts(0)
    logits = given["logits"].round() * torch.tensor([1e-3, 1.0, 1e3])[torch.arange(QUERIES) % 3][:, None]
    result = attend(logits, None, given["query"], given["key"], given["value"], top_k, Reach(False))
    assert torch.equal(result.retrieved.sum(-1)[0], torch.full((HEADS, QUERIES), top_k))
    least = logits.masked_fill(~result.retrieved, torch.inf).amin(-1)[0]
    torch.testing.assert_close(least, logits[0].topk(top_k).values[..., -1], rtol=0, atol=0)


@pytest.mark.parametrize("length", [1, BLOCKS - 1, SHORTEST, 300, LONGEST])
def test_blocks_are_attention(length: int) -> None:
    inputs = [torch.randn(2, length, 3, 8).transpose(1, 2).requires_grad_() for _ in range(3)]  # heads are not contiguous
    grad = torch.randn(2, 3, length, 8)
    found, wanted = (
        (out, *torch.autograd.grad(out, inputs, grad))
        for out in (CausalBlocks.apply(*inputs, 0.3), F.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3))
    )
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=2e-6, rtol=1e-5)


def test_gradients_are_those_of_differences() -> None:
    inputs = [torch.randn(1, 2, 11, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *three: CausalBlocks.apply(*three, 0.7), inputs)


def test_they_are_used_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 1, SHORTEST, 4, requires_grad=True)
    assert worth_it(query, 0.0) and not worth_it(query, 0.1) and not worth_it(query.detach(), 0.0)
    assert not worth_it(query[:, :, 1:], 0.0) and not worth_it(query.double(), 0.0)
    with torch.no_grad():
        assert not worth_it(query, 0.0)
    scales: list[float] = []

    def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        scales.append(scale)
        return value

    monkeypatch.setattr(CausalBlocks, "apply", noted)
    fused_attention(query, query, query, causal=True)
    assert scales == [0.5], "1/sqrt(e) by default"
    fused_attention(query, query, query)
    fused_attention(query, query, query, torch.ones(SHORTEST, SHORTEST, dtype=torch.bool).tril())
    assert len(scales) == 1


def test_under_autocast_it_is_as_exact_as_in_float32() -> None:
    """Sharp attention is not rounded, whatever type the projections have."""
    inputs = [(2.5 * torch.randn(1, 2, SHORTEST, 16)).bfloat16().requires_grad_() for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        out = fused_attention(*inputs, causal=True)
    exact = F.scaled_dot_product_attention(*(one.float() for one in inputs), is_causal=True)
    assert out.dtype == torch.float32 and torch.allclose(out, exact, atol=1e-5)
    for one, other in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(exact.sum(), inputs), strict=True):
        assert torch.allclose(one.float(), other.float(), atol=2e-2, rtol=1e-2)
