"""The published translation loss on random vectors with a plain softmax (misc/mt_loss.json)."""

from __future__ import annotations

import math

import pytest
import torch

from tests.golden.published import PAD, arrays, index, parametrized
from trime.common.types import Contexts, LogMass, TokenPosition
from trime.scoring.mixtures.joint import joint_log_prob
from trime.token_memory.train.visibility import Others
from trime.translation.nearest_in_batch import NearestInBatch

CASES = index("misc/mt_loss.json")


@parametrized("name", list(CASES))
@pytest.mark.parametrize("rows", [7, 512])
def test_loss(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trime.translation.nearest_in_batch.ROWS", rows)
    case, vectors = CASES[name], arrays("misc/mt_loss.npz")
    words = torch.as_tensor(vectors["E"]).double().requires_grad_()
    x = torch.as_tensor(vectors[f"{name}_x"]).double().requires_grad_()
    target = torch.as_tensor(vectors[f"{name}_target"])
    assert case["lens"] is None or (target != PAD).sum(1).tolist() == case["lens"]
    sentence = torch.arange(len(target))[:, None].expand_as(target)
    is_token = target != PAD  # padding is neither query nor memory here
    order = torch.arange(int(is_token.sum()))
    contexts = Contexts(x[is_token], target[is_token], TokenPosition(order * 0, sentence[is_token], order))
    logits = contexts.g @ words.T
    vocabulary = LogMass(logits.gather(1, contexts.token[:, None]).squeeze(1), logits.logsumexp(1))
    memory = NearestInBatch(Others(), case["topk_mem"], case["temp"], case["dist"])
    divisor = torch.tensor([math.sqrt(x.shape[-1])], dtype=torch.float64)
    mass = memory.mass(contexts, contexts, divisor)
    plain = name.startswith("ce")  # the warm-up phase, which only its name distinguishes
    scores = (
        vocabulary.target - vocabulary.total if plain else joint_log_prob(vocabulary, [LogMass(mass.target[0], mass.total[0])])
    )
    (-scores.sum()).backward()
    assert len(scores) == case["sample_size"]
    assert (scores - torch.as_tensor(vectors[f"{name}_lprobs_f64"])[is_token]).abs().max() < 1e-9
    assert abs(-scores.sum().item() - case["loss"]) < 1e-8 * case["loss"]
    assert (x.grad - torch.as_tensor(vectors[f"{name}_grad_x"])).abs().max() < 1e-8
    assert torch.allclose(words.grad, torch.as_tensor(vectors[f"{name}_grad_E"]).double(), rtol=1e-5, atol=1e-6)
