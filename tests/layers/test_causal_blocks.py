"""Causal attention in blocks is attention: values and gradients, at any length, whatever the tensors' layout."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from trime.layers.attention import fused_attention
from trime.layers.causal_blocks import BLOCKS, LONGEST, SHORTEST, CausalBlocks, worth_it


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
