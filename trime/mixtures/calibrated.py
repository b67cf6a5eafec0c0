"""One softmax over the vocabulary and every memory (Eq. 6), where each memory has a temperature and a log-weight of its own.

As a mixture of softmaxes: π is in proportion to the vocabulary's mass and e^b times each memory's.
"""

from __future__ import annotations

from typing import Any

import torch

from trime.mixtures.experts import LOG_PROBABILITY_FLOOR, Evidence, Mixture, log_mixture
from trime.types import Float, Int, Tensor

ROUNDS, STEPS = 3, 12  # over all memories; of the quasi-Newton method for the log-weights


class Calibrated(Mixture):
    """``temperatures``: those that each memory may have."""

    def __init__(self, temperatures: list[float]):
        self.temperatures = tuple(temperatures)
        self.parameters = {}

    def log_weights(self, total: Float[Tensor, "n e"], history: Float[Tensor, "n f"]) -> Float[Tensor, "n e"]:
        return (total + self.parameters["weight"]).log_softmax(-1)

    def fit(self, evidence: Evidence, fold: Int[Tensor, " n"], counts: list[bool], seed: int) -> Float[Tensor, " n"]:
        sizes, experts = list(self.memories.values()), evidence.total.shape[1]
        found = evidence.total.new_empty(len(fold))
        for number in range(int(fold.max()) + 1):
            weight = fit_log_weights(evidence.take(fold != number), sizes)
            own = evidence.take(fold == number)
            found[fold == number] = log_mixture(
                (own.total + weight).log_softmax(-1), own.log_probability.clamp(min=LOG_PROBABILITY_FLOOR)
            )
        self.parameters = {"weight": fit_log_weights(evidence, sizes)}
        assert self.parameters["weight"].shape == (experts,)
        return found

    def describe(self) -> dict[str, Any]:
        weight, first, found = self.parameters["weight"], 1, {}
        for name, size in self.memories.items():
            own = weight[first : first + size]
            chosen, first = int(own.argmax()), first + size
            temperature = {"temperature": self.temperatures[chosen]} if size == len(self.temperatures) else {"expert": chosen}
            found[name] = temperature | {"log_weight": round(float(own[chosen]), 3)}
        return found


def fit_log_weights(evidence: Evidence, sizes: list[int]) -> Float[Tensor, " e"]:
    """Return the log-weight of each expert: of every memory one has a finite one, the vocabulary has 0.

    From the middle temperatures on, memory after memory takes its best one, the log-weights being the best each time.
    """
    firsts = [1 + sum(sizes[:number]) for number in range(len(sizes))]
    chosen = [first + (size - 1) // 2 for first, size in zip(firsts, sizes, strict=True)]
    best, weight = fit_weights_of(evidence, chosen, torch.zeros(len(chosen)))
    for _ in range(ROUNDS):
        before = list(chosen)
        for number, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
            for other in range(first, first + size):
                tried = [*chosen[:number], other, *chosen[number + 1 :]]
                loss, own = fit_weights_of(evidence, tried, weight)
                if loss < best:
                    best, chosen, weight = loss, tried, own
        if chosen == before:
            break
    result = torch.full((evidence.total.shape[1],), -torch.inf)
    result[0], result[chosen] = 0.0, weight
    return result


def fit_weights_of(evidence: Evidence, chosen: list[int], start: Float[Tensor, " m"]) -> tuple[float, Float[Tensor, " m"]]:
    """Return the least mean loss, and the log-weights of the chosen experts that give it, by a quasi-Newton method."""
    index = [0, *chosen]
    total, found = evidence.total[:, index], evidence.log_probability[:, index].clamp(min=LOG_PROBABILITY_FLOOR)
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weight], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        shifted = total + torch.cat([weight.new_zeros(1), weight])
        value = -log_mixture(shifted.log_softmax(-1), found).mean()
        value.backward()
        return value

    optimizer.step(loss)
    return loss().item(), weight.detach()
