"""Mixture weights by a small network: π(c) = softmax(W2 relu(W1 x + b1) + b2), averaged over cross-fitted networks.

The features x are the log-mass of the vocabulary, those of the experts (relative to the vocabulary's for similarities, log
counts for n-grams), and how well each expert predicted the tokens before. Networks start from the best constant weights:
otherwise a memory that deserves one percent is turned off before its share is found. Related work: adaptive kNN-MT (Zheng et
al. 2021) chooses K; the gates of He et al. (2021) and Drozdov et al. (2022) choose the share of one memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from trime.common.checks import check_number
from trime.common.types import Bool, Float, Int, Tensor
from trime.scoring.mixtures.experts import (
    LOG_PROBABILITY_FLOOR,
    ExpertMasses,
    History,
    Mixture,
    Parameters,
    check_folds,
    check_temperatures,
)

LEARNED = ("w1", "b1", "w2", "b2")  # names of the trained parameters
FEATURE_LIMIT = 4.0  # standard deviations at which features are clamped; also the value for an expert without entries
BATCH = 2**14  # tokens that are scored at once
STEPS = 50  # to find the constant weights
WEIGHT_IN_STEPS = 1e-20  # the least constant weight on the way
WEIGHT_FLOOR = -8.0  # the least log-weight that networks start from
MIN_IMPROVEMENT = 1e-4  # nats


class Adaptive(Mixture):
    """A mixture of networks with ``hidden`` units, one for each fold of documents.

    Each network is trained without its own fold, on which it is scored, and without the next fold, on which it is stopped,
    starting from the constant weights that are best on the rest. UserError for settings out of range.
    ``least_deviation``: of a feature, in nats; one that varies less is not scaled up to deviation 1.
    """

    def __init__(
        self,
        temperatures: list[float],
        hidden: int = 32,
        history: tuple[float, ...] | list[float] = (0.0, 0.8),
        epochs: int = 60,
        patience: int = 4,
        batch: int = 1024,
        learning_rate: float = 0.01,
        least_deviation: float = 0.001,
    ):
        check_temperatures(temperatures)
        counts = ("hidden", hidden, 1), ("batch", batch, 1), ("epochs", epochs, 0), ("patience", patience, 0)
        for name, count, least in counts:
            check_number(name, count, at_least=least, whole=True)
        check_number("learning_rate", learning_rate, above=0)
        for decay in history:
            check_number("history", decay, at_least=0, at_most=1)
        self.temperatures, self.hidden, self.decays = tuple(temperatures), hidden, tuple(history)
        self.epochs, self.patience, self.batch, self.learning_rate = epochs, patience, batch, learning_rate
        self.least_deviation = least_deviation
        self.parameters = Parameters()

    def features(self, total: Float[Tensor, "n e"], history: Float[Tensor, "n f"]) -> Float[Tensor, "n x"]:
        """Return the features of the networks, with mean 0 and standard deviation 1 over the tokens of the fit."""
        raw_features = self.raw_features(total, history, self.parameters["counts"])
        scaled = (raw_features - self.parameters["mean"]) / self.parameters["deviation"]
        return scaled.clamp(-FEATURE_LIMIT, FEATURE_LIMIT)

    @staticmethod
    def raw_features(total: Tensor, history: Tensor, counts: Tensor) -> Float[Tensor, "n x"]:
        """Return the features before normalization."""
        vocabulary = total[:, :1]
        return torch.cat([vocabulary, total[:, 1:] - torch.where(counts[1:], 0, vocabulary), history], 1)

    def log_weights(self, total: Float[Tensor, "n e"], history: Float[Tensor, "n f"]) -> Float[Tensor, "n e"]:
        networks = self.network_log_weights(self.features(total, history), total.isfinite())
        return networks.logsumexp(0).T - math.log(self.networks)

    @property
    def networks(self) -> int:  # that are averaged
        return len(self.parameters["b2"])

    def network_log_weights(self, x: Float[Tensor, "n x"], known: Bool[Tensor, "n e"]) -> Float[Tensor, "k e n"]:
        """Return log π of each network; -inf for experts that are not known."""
        # Tokens are the last axis of every product: experts are too few to fill vector registers.
        w1, b1, w2, b2 = (self.parameters[name].mT for name in LEARNED)
        hidden = torch.relu(torch.baddbmm(b1, w1, x.T.expand(self.networks, -1, -1)))
        return torch.baddbmm(b2, w2, hidden).masked_fill(~known.T, -torch.inf).log_softmax(1)

    def network_log_probability(self, x: Tensor, known: Tensor, log_probability: Float[Tensor, "n e"]) -> Float[Tensor, "k n"]:
        return torch.logsumexp(self.network_log_weights(x, known) + log_probability.T, 1)

    @torch.enable_grad()
    def fit(
        self,
        masses: ExpertMasses,
        fold: Int[Tensor, " n"],
        counts: list[bool],
        seed: int,
        features: Float[Tensor, "n f"] | None = None,
    ) -> Float[Tensor, " n"]:
        """As ``Mixture.fit``; ``features``: of each token, in place of the history."""
        check_folds(fold)
        generator = torch.Generator().manual_seed(seed)
        history = History(self.decays).text_features(masses) if features is None else features
        total = masses.total
        self.initialize(total, history, torch.tensor(counts), int(fold.max()) + 1, generator)
        x, known = self.features(total, history), total.isfinite()
        log_probability = masses.log_probability.clamp(min=LOG_PROBABILITY_FLOOR)
        network = torch.arange(self.networks)[:, None]
        # Network k is scored on fold k and stopped on the next fold: neither may train it.
        stopping = fold == (network + 1) % self.networks
        held_out = stopping | (fold == network)
        self.parameters["b2"] = constant_log_weights(log_probability, known, ~held_out)[:, None]
        learned = {name: self.parameters[name].requires_grad_() for name in LEARNED}
        optimizer = torch.optim.Adam(learned.values(), self.learning_rate)
        best_parameters = {name: tensor.detach().clone() for name, tensor in learned.items()}
        loss = -self.network_scores(x, known, log_probability)
        best, since = (loss * stopping).sum(1) / stopping.sum(1), total.new_zeros(self.networks)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(x), generator=generator).split(self.batch):
                loss = -self.network_log_probability(x[rows], known[rows], log_probability[rows])
                training = ~held_out[:, rows]
                optimizer.zero_grad()
                ((loss * training).sum(1) / training.sum(1).clamp(min=1)).sum().backward()
                optimizer.step()
            loss = -self.network_scores(x, known, log_probability)
            stopping_loss = (loss * stopping).sum(1) / stopping.sum(1)
            better = (stopping_loss < best - MIN_IMPROVEMENT) & (since < self.patience)
            best, since = torch.where(better, stopping_loss, best), torch.where(better, 0, since + 1)
            for name, tensor in learned.items():
                best_parameters[name][better] = tensor.detach()[better]
            if (since >= self.patience).all():
                break
        self.parameters |= best_parameters
        return self.network_scores(x, known, log_probability).gather(0, fold[None])[0]

    def initialize(self, total: Tensor, history: Tensor, counts: Tensor, folds: int, generator: torch.Generator) -> None:
        """Set the scale of features, and initialize networks whose mixture weights do not depend on them."""
        # Weights do not depend on features at first (w2 = 0): training starts from the best constant ones.
        raw_features = self.raw_features(total, history, counts)
        finite = torch.where(raw_features.isfinite(), raw_features, torch.nan)
        mean = finite.nanmean(0).nan_to_num()
        deviation = (finite - mean).square().nanmean(0).sqrt().nan_to_num(nan=1.0).clamp(min=self.least_deviation)
        inputs, experts = raw_features.shape[1], total.shape[1]
        w1 = total.new_empty(folds, inputs, self.hidden).uniform_(-1, 1, generator=generator) / math.sqrt(inputs)
        self.parameters = {"mean": mean, "deviation": deviation, "counts": counts, "w1": w1}
        self.parameters["b1"] = total.new_zeros(folds, 1, self.hidden)
        self.parameters["w2"] = total.new_zeros(folds, self.hidden, experts)
        self.parameters["b2"] = total.new_zeros(folds, 1, experts)

    @torch.no_grad()
    def network_scores(self, x: Tensor, known: Tensor, log_probability: Tensor) -> Float[Tensor, "k n"]:
        """Return log P of each token by each network, batch by batch and without gradient."""
        batches = [slice(first, first + BATCH) for first in range(0, len(x), BATCH)]
        scores = [self.network_log_probability(x[rows], known[rows], log_probability[rows]) for rows in batches]
        return torch.cat(scores, 1)

    def describe(self) -> dict[str, Any]:
        count = sum(self.parameters[name][0].numel() for name in LEARNED)
        return {"parameters": count, "networks": self.networks}


def constant_log_weights(
    log_probability: Float[Tensor, "n e"], known: Bool[Tensor, "n e"], training: Bool[Tensor, "k n"]
) -> Float[Tensor, "k e"]:
    """Return the log of the constant weights, from WEIGHT_FLOOR up, under which each training set is most probable."""
    probability = log_probability.exp() * known
    is_known, tokens = known.to(probability.dtype), training.T.to(probability.dtype)
    # Weights are shared out among the experts known at a token: P = Σ_e π_e P_e / Σ_e π_e. Each step maximises a lower bound
    # of the likelihood (EM, with the logarithm of the divisor bounded by its tangent).
    weight = log_probability.new_full((len(training), known.shape[1]), 1 / known.shape[1])
    for _ in range(STEPS):
        chosen = probability.T @ (tokens / (probability @ weight.T).clamp(min=torch.finfo(weight.dtype).tiny))
        possible = is_known.T @ (tokens / (is_known @ weight.T))
        weight = weight * (chosen / possible.clamp(min=1e-12)).T
        # A token that only one expert knows may be held out: weights of 0 would divide 0 by 0 there.
        weight = (weight / weight.sum(1, keepdim=True)).clamp(min=WEIGHT_IN_STEPS)
    return weight.clamp(min=math.exp(WEIGHT_FLOOR)).log()
