"""Settings of the CPU change the time of computations, not their results."""

from __future__ import annotations

import pytest
import torch

from trime.common.cpu import MAX_ERROR, matmul_error, select_matmul
from trime.models.layers.attention import MATH_MAX_KEYS, fused_attention


def test_products_stay_float32() -> None:
    select_matmul()
    for shape in ((700, 300, 500), (5, 2000, 7), (129, 31, 1)):
        assert matmul_error(*shape) < MAX_ERROR


def test_a_library_that_rounds_is_not_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor whose oneDNN multiplies in bfloat16."""
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr("trime.common.cpu.matmul_error", lambda *shape: 3e-3)
    select_matmul()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("length", [3, MATH_MAX_KEYS, MATH_MAX_KEYS + 1])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_the_same_in_both_forms(length: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In values and gradients, causal or under a mask; products stay float32, on any processor."""
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, length, 8).requires_grad_()
    mask = torch.rand(2, 1, length, length) < 0.7 if masked else None
    mask = None if mask is None else mask | torch.eye(length, dtype=torch.bool)
    results = []
    for precision in ("highest", "medium"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        output = fused_attention(query, key, value, mask, causal=mask is None)
        results.append((output, *torch.autograd.grad(output.square().sum(), (query, key, value))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
