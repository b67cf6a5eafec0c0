"""The target's logit and the logsumexp by Triton's kernels: in Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

import math

import pytest
import torch

from tests.conftest import DEVICE
from trime.models.layers import heads
from trime.models.layers.heads import pick_logit


@pytest.mark.parametrize("rows, width", [(1, 1), (3, 70), (2, 4096), (4, 5001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_triton_kernels_are_the_definition(
    rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are float32's; the gradient has the logits' type."""
    pytest.importorskip("triton", reason="pip install triton (it comes with torch for CUDA)")
    from trime.models.layers import pick_cuda

    torch.manual_seed(rows + width)
    logits = (8 * torch.randn(rows, width)).to(dtype)
    logits[0, width // 2] = -math.inf if width > 1 else 0.0
    index = torch.randint(width, (rows,))
    index[0] = 0
    weights = torch.randn(2, rows)
    results = []
    for kernels, of, device in [(None, torch.float64, "cpu"), (pick_cuda, dtype, DEVICE)]:
        monkeypatch.setattr(heads, "kernels_for", lambda _, kernels=kernels: kernels)
        own = logits.to(device, of).requires_grad_()
        parts = pick_logit(own, index.to(device))
        (torch.stack(parts) * weights.to(device)).sum().backward()
        assert own.grad is not None and own.grad.dtype == of
        results.append([part.detach().cpu().double() for part in (*parts, own.grad)])
    expected, found = results
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    precision = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found[2], expected[2], rtol=precision, atol=1e-6)
