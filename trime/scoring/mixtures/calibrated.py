"""One softmax over the vocabulary and every memory (Eq. 6), with a fitted temperature and log-weight for each memory.

As a mixture of softmaxes: π is proportional to the vocabulary's mass and e^b times each memory's mass.
"""

from __future__ import annotations

from typing import Any

import torch

from trime.common.types import Float, Int, Tensor
from trime.scoring.mixtures.experts import (
    LOG_PROBABILITY_FLOOR,
    ExpertMasses,
    Mixture,
    Parameters,
    check_folds,
    check_temperatures,
    log_mixture,
)

ROUNDS, STEPS = 3, 12  # passes over all memories; steps of the quasi-Newton method for the log-weights


class Calibrated(Mixture):
    """A mixture with one of ``temperatures`` and a log-weight for each memory."""

    def __init__(self, temperatures: list[float]):
        check_temperatures(temperatures)
        self.temperatures = tuple(temperatures)
        self.parameters = Parameters()

    def log_weights(self, total: Float[Tensor, "n e"], history: Float[Tensor, "n f"]) -> Float[Tensor, "n e"]:
        return (total + self.parameters["weight"]).log_softmax(-1)

    def fit(self, masses: ExpertMasses, fold: Int[Tensor, " n"], counts: list[bool], seed: int) -> Float[Tensor, " n"]:
        check_folds(fold)
        sizes, experts = list(self.memories.values()), masses.total.shape[1]
        scores = masses.total.new_empty(len(fold))
        for number in range(int(fold.max()) + 1):
            weight = fit_log_weights(masses.take(fold != number), sizes)
            held_out = masses.take(fold == number)
            log_probability = held_out.log_probability.clamp(min=LOG_PROBABILITY_FLOOR)
            scores[fold == number] = log_mixture((held_out.total + weight).log_softmax(-1), log_probability)
        self.parameters = {"weight": fit_log_weights(masses, sizes), "counts": torch.tensor(counts)}
        assert self.parameters["weight"].shape == (experts,)
        return scores

    def describe(self) -> dict[str, Any]:
        weight, first, fitted = self.parameters["weight"], 1, {}
        counts = self.parameters.get("counts")  # earlier versions did not keep them
        for name, size in self.memories.items():
            weights = weight[first : first + size]
            chosen, first = int(weights.argmax()), first + size
            is_count = size != len(self.temperatures) if counts is None else bool(counts[first - 1])
            temperature = {"expert": chosen} if is_count else {"temperature": self.temperatures[chosen]}
            fitted[name] = temperature | {"log_weight": round(float(weights[chosen]), 3)}
        return fitted


def fit_log_weights(masses: ExpertMasses, sizes: list[int]) -> Float[Tensor, " e"]:
    """Return the log-weight of each expert: finite for one expert of each memory, 0 for the vocabulary."""
    # Coordinate descent from the middle temperatures: a memory takes its best one, with weights fitted for each candidate.
    firsts = [1 + sum(sizes[:number]) for number in range(len(sizes))]
    chosen = [first + (size - 1) // 2 for first, size in zip(firsts, sizes, strict=True)]
    best, weight = fit_weights_of(masses, chosen, masses.total.new_zeros(len(chosen)))
    for _ in range(ROUNDS):
        before = list(chosen)
        for number, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
            for other in range(first, first + size):
                candidate = [*chosen[:number], other, *chosen[number + 1 :]]
                loss, fitted = fit_weights_of(masses, candidate, weight)
                if loss < best:
                    best, chosen, weight = loss, candidate, fitted
        if chosen == before:
            break
    result = masses.total.new_full((masses.total.shape[1],), -torch.inf)
    result[0], result[chosen] = 0.0, weight
    return result


def fit_weights_of(masses: ExpertMasses, chosen: list[int], start: Float[Tensor, " m"]) -> tuple[float, Float[Tensor, " m"]]:
    """Fit the log-weights of the chosen experts by a quasi-Newton method; return the mean loss and the log-weights."""
    index = [0, *chosen]
    total, log_probability = masses.total[:, index], masses.log_probability[:, index].clamp(min=LOG_PROBABILITY_FLOOR)
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weight], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        shifted = total + torch.cat([weight.new_zeros(1), weight])
        value = -log_mixture(shifted.log_softmax(-1), log_probability).mean()
        value.backward()
        return value

    optimizer.step(loss)
    return loss().item(), weight.detach()
