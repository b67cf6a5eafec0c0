"""The models' forward passes from released-format checkpoints: f, g, log-probabilities (README section 2b)."""

from __future__ import annotations

import pytest
import torch

from tests.golden.published import ROOT, arrays, network, parametrized

MODELS = sorted(path.parent.name for path in (ROOT / "model").glob("*/forward.npz"))
PAD = 1


@parametrized("model", MODELS)
@pytest.mark.parametrize("pair", [("checkpoint_init", "forward"), ("checkpoint_last", "forward_last")])
def test_forward(model: str, pair: tuple[str, str]) -> None:
    found, net = arrays(f"model/{model}/{pair[1]}.npz"), network(model, pair[0])
    tokens, target = (torch.as_tensor(found[name]).long() for name in ("tokens", "target"))
    real = tokens != PAD
    with torch.no_grad():
        encoding, state = net.backbone(tokens, None, None)
        mass = net.head.evidence(encoding.f[real], target[real])
        every = net.head.log_probs(encoding.f[real])
    assert state is None
    close(encoding.f[real], found["features"][real.numpy()])
    close(encoding.g[real], found["last_ffn_input"][real.numpy()])
    if "target_logprob" in found:
        close(mass.target - mass.total, found["target_logprob"][real.numpy()])
    for full in [found["full_logprob"]] if "full_logprob" in found else []:
        close(every, full[real.numpy()])
    for logits in [found["logits"]] if "logits" in found else []:
        close(every, torch.as_tensor(logits).log_softmax(-1)[real])
    close(mass.target - mass.total, every.gather(1, target[real][:, None]).squeeze(1))
    assert torch.allclose(every.logsumexp(1), torch.zeros(len(every)), atol=1e-5)


def close(actual: torch.Tensor, expected: object) -> None:
    assert (actual - torch.as_tensor(expected)).abs().max() < 2e-5
