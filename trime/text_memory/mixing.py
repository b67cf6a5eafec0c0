"""The distribution of the next token: the model's own and those of the experts, weighted by the fitted mixture."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from trime.common.types import Float, Tensor
from trime.scoring.mixtures.adaptive import Adaptive
from trime.scoring.mixtures.experts import log_mixture
from trime.text_memory.experts import Candidates, Experts
from trime.text_memory.segment import Source
from trime.text_memory.worth import Scored

MODEL = "model"  # the name of the model's part of a probability


class Prediction(NamedTuple):
    """The next token: its log-probabilities, the weight of each expert, and what the memories propose."""

    log_probability: Float[Tensor, " v"]
    weight: np.ndarray  # [e]
    candidates: Candidates


class ExplainedToken(NamedTuple):
    """A token of a text: its probability, the parts of it by memory, and where the memories have it from."""

    token: int
    text: str
    probability: float
    parts: dict[str, float]  # of the model and of each memory; they sum to the probability
    sources: list[tuple[str, Source, str]]  # memory, place, and the text there


def confidence(log_probability: Float[Tensor, "n v"]) -> Float[Tensor, "n 2"]:
    """Return how sure a model is of its next token: the largest log-probability, and the entropy in nats."""
    entropy = -(log_probability.exp() * log_probability.clamp(min=-100)).sum(1)
    return torch.stack([log_probability.amax(1), entropy], 1)


def mixed(mixture: Adaptive, scored: Scored) -> Float[Tensor, " n"]:
    """Return the log-probability of each token of a text under the mixture."""
    return log_mixture(mixture.log_weights(scored.masses.total, scored.features), scored.masses.log_probability)


@torch.no_grad()
def predict(
    experts: Experts, mixture: Adaptive, tokens: np.ndarray, query: Float[Tensor, "1 d"], log_probability: Float[Tensor, "1 v"]
) -> Prediction:
    """Return the distribution of the next token after a text."""
    total, candidates = experts.next_token(tokens, query)
    weight = mixture.log_weights(total, confidence(log_probability).cpu())[0].double().exp().numpy()
    shares = torch.from_numpy(weight[candidates.expert] * candidates.probability).to(log_probability)
    probability = weight[0] * log_probability[0].exp()
    probability.index_add_(0, torch.from_numpy(candidates.token).to(log_probability.device), shares)
    return Prediction(probability.log(), weight, candidates)


def parts_of(experts: Experts, predicted: Prediction, token: int, log_probability: float) -> dict[str, float]:
    """Return the parts of a token's probability: the model's, and each memory's."""
    weight, candidates = predicted.weight, predicted.candidates
    parts, first = {MODEL: float(weight[0] * np.exp(log_probability))}, 1
    proposed = candidates.token == token
    for name, size in experts.sizes.items():
        chosen = proposed & (candidates.expert >= first) & (candidates.expert < first + size)
        parts[name] = float((weight[candidates.expert[chosen]] * candidates.probability[chosen]).sum())
        first += size
    return parts
