"""A mixture of softmaxes: P(w) = Σ_e π_e(c) P_e(w), over the vocabulary's softmax and experts of every memory.

An expert is a memory's own softmax at one temperature, or the continuations of one n-gram order. Mixtures differ in the
weights π; these may know what is known before the target alone: each expert's mass, and how well it said what came before.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from trime.types import Float, Int, Mass, Tensor

LOG_PROBABILITY_FLOOR = -60.0  # nats: a log-probability below it counts as this in training
HISTORY_FLOOR, HISTORY_DEFAULT = (
    -12.0,
    -6.0,
)  # nats: how badly an expert may have done at most, and how well where nothing was read
CHUNK = 256  # tokens of a document whose history is computed at once


class Evidence(NamedTuple):
    """What experts say of n tokens: the vocabulary first, then each memory's. ``document`` [n]: which one a token is of."""

    target: Float[Tensor, "n e"]  # log-mass of the target
    total: Float[Tensor, "n e"]  # log-mass of all tokens, -inf where an expert knows nothing
    document: Int[Tensor, " n"]

    @property
    def log_probability(self) -> Float[Tensor, "n e"]:
        """Of the target, under each expert."""
        return torch.where(self.total.isfinite(), self.target - self.total.nan_to_num(neginf=0), -torch.inf)

    def cpu(self) -> Evidence:
        """The same in the machine's own memory."""
        return Evidence(*(part.cpu() for part in self))

    def take(self, index: Tensor | slice) -> Evidence:
        """The tokens at an index, a mask or a slice."""
        return Evidence(*(part[index] for part in self))


def stack_evidence(vocabulary: Mass, found: dict[str, Mass], document: Int[Tensor, " n"]) -> Evidence:
    """Return the masses [1 e n] of memories, in order, beside the vocabulary's [n]."""
    target = torch.cat([vocabulary.target[None], *(mass.target[0] for mass in found.values())])
    total = torch.cat([vocabulary.total[None], *(mass.total[0] for mass in found.values())])
    return Evidence(target.T.float(), total.T.float(), document)


def concat_evidence(parts: list[Evidence]) -> Evidence:
    """Return tokens one after the other."""
    return Evidence(*(torch.cat(column) for column in zip(*parts, strict=True)))


@dataclass
class History:
    """How well each expert predicted the document's earlier tokens: means of log-probability, decaying by each of ``decays``.

    A decay of 0 is the last token alone.
    """

    decays: tuple[float, ...]
    document: int = -1

    def features(self, document: int, found: Float[Tensor, "n e"]) -> Float[Tensor, "n f"]:
        """Return what is known before each of a document's next tokens, whose log-probabilities are ``found``."""
        if document != self.document:
            self.document, self.sums = document, [(found.new_zeros(found.shape[1]), 0.0) for _ in self.decays]
        value, count = found.clamp(min=HISTORY_FLOOR), len(found)
        features = []
        for number, decay in enumerate(self.decays):
            held, weight = self.sums[number]
            power = torch.tensor(decay, dtype=torch.float64) ** torch.arange(count + 1)  # 0 to the power of 0 is 1
            age = torch.arange(count)[:, None] - 1 - torch.arange(count)[None]
            share = torch.where(age >= 0, power[age.clamp(min=0)], 0).to(found)
            power = power.to(found)
            total = share.sum(1) + power[:-1] * weight
            mean = (share @ value + power[:-1, None] * held) / total.clamp(min=1e-30)[:, None]
            features.append(torch.where(total[:, None] > 0, mean, HISTORY_DEFAULT))
            newest = power[:-1].flip(0)
            self.sums[number] = (newest @ value + power[-1] * held, float(newest.sum() + power[-1] * weight))
        return torch.cat(features, 1) if features else found.new_empty(count, 0)

    def text_features(self, evidence: Evidence) -> Float[Tensor, "n f"]:
        """Return the features of whole documents, in their order."""
        found, document = evidence.log_probability, evidence.document
        edges = [0, *((document.diff() != 0).nonzero().squeeze(1) + 1).tolist(), len(document)]
        parts = [
            self.features(int(document[low]), found[start : min(start + CHUNK, high)])
            for low, high in pairwise(edges)
            for start in range(low, high, CHUNK)
        ]
        return torch.cat(parts)


class Mixture(ABC):
    """Weights of experts. ``memories``: how many experts each memory has, in order."""

    temperatures: tuple[float, ...]  # of the experts of a memory that is searched by similarity
    decays: tuple[float, ...] = ()  # of the history that the weights know
    learns = False  # from tokens that were scored
    memories: dict[str, int]
    parameters: dict[str, Tensor]  # what was fitted

    @abstractmethod
    def log_weights(self, total: Float[Tensor, "n e"], history: Float[Tensor, "n f"]) -> Float[Tensor, "n e"]:
        """Return log π, which sums to one over the experts that know something."""

    @abstractmethod
    def fit(self, evidence: Evidence, fold: Int[Tensor, " n"], counts: list[bool], seed: int) -> Float[Tensor, " n"]:
        """Fit to tokens; return log P of each by a mixture that did not see its fold (numbered from 0).

        ``counts``: of each expert, whether its mass is a count.
        """

    def state(self) -> dict[str, Tensor]:
        """Return what was fitted."""
        return {name: part.detach().contiguous() for name, part in self.parameters.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take what was fitted."""
        self.parameters = dict(state)

    def to(self, device: torch.device) -> Mixture:
        """Return a copy on a device; what it learns from then on stays with it."""
        other = copy.copy(self)
        other.load({name: part.detach().clone().to(device) for name, part in self.parameters.items()})
        return other

    def learn(self, evidence: Evidence, history: Float[Tensor, "n f"]) -> None:  # noqa: B027 (few learn on)
        """Learn from tokens that were scored, where the mixture goes on learning."""

    def describe(self) -> dict[str, Any]:
        """Return what a reader wants to know of what was fitted."""
        return {}


def log_mixture(log_weights: Float[Tensor, "*k n e"], log_probability: Float[Tensor, "n e"]) -> Float[Tensor, "*k n"]:
    """log Σ_e π_e P_e."""
    return torch.logsumexp(log_weights + log_probability, -1)
