"""Trajectories of the published optimisers over given gradients (misc/optim.json)."""

from __future__ import annotations

import pytest
import torch

from tests.golden.published import arrays, index, parametrized
from trime.training.optimizers import NAG, Adam

CASES = index("misc/optim.json")


@parametrized("name", list(CASES))
def test_trajectory(name: str) -> None:
    case, found = CASES[name], arrays("misc/optim.npz")
    parts = sorted(key.removeprefix(f"{name}_p") for key in found if key.startswith(f"{name}_p"))
    path, gradients = ([torch.as_tensor(found[f"{name}_{kind}{part}"]) for part in parts] for kind in "pg")
    weights = [torch.nn.Parameter(values[0].clone()) for values in path]
    own = {"weight_decay": case["weight_decay"], "lr": case["lr_at_construction"]}
    if case["betas"] is None:
        optimizer: torch.optim.Optimizer = NAG(weights, momentum=case["momentum"], **own)
    else:
        optimizer = Adam(weights, betas=case["betas"], eps=case["eps"], **own)
    for step, lr in enumerate(case["lr"]):
        optimizer.param_groups[0]["lr"] = lr
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient[step].clone()
        norm = torch.nn.utils.clip_grad_norm_(weights, case["clip_norm"] or torch.inf)
        assert float(norm) == pytest.approx(case["grad_norm_before_clipping"][step], rel=1e-5)
        optimizer.step()
        for weight, values in zip(weights, path, strict=True):
            rounding = 4 * (step + 1) * torch.finfo(torch.float32).eps  # of each update, a few times
            assert torch.allclose(weight.detach(), values[step + 1], rtol=rounding, atol=rounding)


def test_adam_is_torchs_where_epsilon_is_nothing() -> None:
    torch.manual_seed(0)
    one = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    other = torch.nn.Parameter(one.detach().clone())
    ours = Adam([one], lr=0.1, betas=(0.9, 0.98), eps=0.0, weight_decay=0.1)
    theirs = torch.optim.AdamW([other], lr=0.1, betas=(0.9, 0.98), eps=0.0, weight_decay=0.1)
    for _ in range(5):
        one.grad = torch.randn(5, dtype=torch.float64)
        other.grad = one.grad.clone()
        ours.step()
        theirs.step()
    assert torch.allclose(one, other, rtol=1e-12)
