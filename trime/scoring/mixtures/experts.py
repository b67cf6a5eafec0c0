"""Mixtures of softmaxes: P(w) = Σ_e π_e(c) P_e(w), over the vocabulary's softmax and the experts of every memory.

An expert is a memory's own softmax at one temperature, or the continuations of one n-gram order. Mixtures differ in their
weights π, which depend only on facts known before the target: each expert's mass, and how well it predicted earlier tokens.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from trime.common.checks import check_number, short_repr
from trime.common.types import Float, Int, LogMass, Tensor
from trime.errors import UserError

LOG_PROBABILITY_FLOOR = -60.0  # nats: smaller log-probabilities are clamped to it in training
HISTORY_FLOOR = -12.0  # nats: smaller log-probabilities are clamped to it in histories
HISTORY_DEFAULT = -6.0  # nats: the value of a history before the first token
FEWEST_FOLDS = 3  # to fit to some, stop at one and score another
BLOCKS = 4  # blocks of text per fold, if there are fewer documents than folds
CHUNK = 256  # tokens of a document whose history is computed at once


class ExpertMasses(NamedTuple):
    """The log-masses of n tokens under e experts: the vocabulary first, then those of each memory."""

    target: Float[Tensor, "n e"]  # log-mass of the target
    total: Float[Tensor, "n e"]  # log-mass of all tokens, -inf where an expert has no entries
    document: Int[Tensor, " n"]  # of each token

    @property
    def log_probability(self) -> Float[Tensor, "n e"]:
        """Return the log-probability of the target under each expert; -inf where an expert has no entries."""
        return torch.where(self.total.isfinite(), self.target - self.total.nan_to_num(neginf=0), -torch.inf)

    def cpu(self) -> ExpertMasses:
        return ExpertMasses(*(column.cpu() for column in self))

    def take(self, index: Tensor | slice) -> ExpertMasses:
        """Return the tokens at an index, a mask or a slice."""
        return ExpertMasses(*(column[index] for column in self))


def stack_masses(vocabulary: LogMass, memories: dict[str, LogMass], document: Int[Tensor, " n"]) -> ExpertMasses:
    """Return the masses of the vocabulary [n] and those of memories [1 e n] side by side, in order."""
    target = torch.cat([vocabulary.target[None], *(mass.target[0] for mass in memories.values())])
    total = torch.cat([vocabulary.total[None], *(mass.total[0] for mass in memories.values())])
    return ExpertMasses(target.T.float(), total.T.float(), document)


def concat_masses(several: list[ExpertMasses]) -> ExpertMasses:
    return ExpertMasses(*(torch.cat(column) for column in zip(*several, strict=True)))


@dataclass
class History:
    """Each expert's record on the document's earlier tokens: a decaying mean of log-probability for each of ``decays``.

    With decay 0 it is the log-probability of only the last token.
    """

    decays: tuple[float, ...]
    document: int | None = None

    def features(self, document: int, log_probability: Float[Tensor, "n e"]) -> Float[Tensor, "n f"]:
        """Return the features before each of a document's next tokens, whose log-probabilities then enter the history."""
        if document != self.document:
            self.document, self.sums = document, log_probability.new_zeros(len(self.decays), 1 + log_probability.shape[1])
        features = []
        # A decaying sum is a product with a matrix of powers, chunk by chunk: a loop over tokens would be slow.
        for chunk in log_probability.split(CHUNK):
            value = torch.nn.functional.pad(chunk.clamp(min=HISTORY_FLOOR), (1, 0), value=1.0)  # the ones sum to weights
            earlier = torch.cat([self.sums[:, None], value.expand(len(self.decays), -1, -1)], 1)
            sums = earlier.mT @ decay_powers(self.decays, len(value) + 1, value.dtype, value.device)
            self.sums = sums[:, :, -1]
            total, sums = sums[:, :1, :-1], sums[:, 1:, :-1]
            features.append(torch.where(total > 0, sums / total.clamp(min=1e-30), HISTORY_DEFAULT).flatten(0, 1).T)
        return torch.cat(features)

    def text_features(self, masses: ExpertMasses) -> Float[Tensor, "n f"]:
        """Return the features of all tokens of a text of whole documents."""
        log_probability, document = masses.log_probability, masses.document
        edges = [0, *((document.diff() != 0).nonzero().squeeze(1) + 1).tolist(), len(document)]
        return torch.cat([self.features(int(document[low]), log_probability[low:high]) for low, high in pairwise(edges)])


@lru_cache(maxsize=16)
def decay_powers(decays: tuple[float, ...], size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "f m m"]:
    """Return the weight decay^(j - i) of row i in the sum of column j, 0 for the rows below; 0 to the power of 0 is 1."""
    age = torch.arange(size)[None] - torch.arange(size)[:, None]
    power = torch.tensor(decays, dtype=torch.float64)[:, None, None] ** age.clamp(min=0)
    return torch.where(age >= 0, power, 0).to(device, dtype)


class Parameters(dict[str, Tensor]):
    """Fitted tensors by name; UserError where there are none yet."""

    def __missing__(self, name: str) -> Tensor:
        raise UserError("the mixture has not been fitted yet: fit it first")


def check_temperatures(temperatures: Sequence[float]) -> None:
    """Raise UserError unless there are temperatures, all of them positive."""
    if not isinstance(temperatures, Sequence) or isinstance(temperatures, str) or not temperatures:
        raise UserError(f"temperatures={short_repr(temperatures)}: name at least one, as in [0.5, 1.0]")
    for temperature in temperatures:
        check_number("temperatures", temperature, above=0)


def check_folds(fold: Int[Tensor, " n"]) -> None:
    """Raise UserError where too few tokens leave fewer than three folds."""
    if len(fold.unique()) < FEWEST_FOLDS:
        raise UserError(f"a mixture cannot be fitted to {len(fold)} tokens in {len(fold.unique())} folds: it needs more text")


class Mixture(ABC):
    """A rule for the weights of experts; ``memories``: the number of experts of each memory, in order."""

    temperatures: tuple[float, ...]  # one expert each, for memories that compare similarities
    decays: tuple[float, ...] = ()  # of the history on which the weights depend
    memories: dict[str, int]
    parameters: dict[str, Tensor]  # fitted tensors by name

    @abstractmethod
    def log_weights(self, total: Float[Tensor, "n e"], history: Float[Tensor, "n f"]) -> Float[Tensor, "n e"]:
        """Return log π; π sums to one over the experts that have entries."""

    @abstractmethod
    def fit(self, masses: ExpertMasses, fold: Int[Tensor, " n"], counts: list[bool], seed: int) -> Float[Tensor, " n"]:
        """Fit to tokens; return log P of each under a fit without its fold (cross-fitted; folds are numbered from 0).

        ``counts``: for each expert, whether its mass is a count.
        """

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.detach().contiguous() for name, tensor in self.parameters.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        self.parameters = dict(state)

    def to(self, device: torch.device) -> Mixture:
        """Return a copy on a device."""
        other = copy.copy(self)
        other.load({name: tensor.detach().clone().to(device) for name, tensor in self.parameters.items()})
        return other

    def describe(self) -> dict[str, Any]:
        """Return a summary of the fit for reports."""
        return {}


def log_mixture(log_weights: Float[Tensor, "*k n e"], log_probability: Float[Tensor, "n e"]) -> Float[Tensor, "*k n"]:
    """Return log Σ_e π_e P_e."""
    return torch.logsumexp(log_weights + log_probability, -1)


def score_tokens(mixture: Mixture, masses: ExpertMasses) -> Float[Tensor, " n"]:
    """Return log P of each token under a fitted mixture."""
    history = History(mixture.decays).text_features(masses)
    with torch.no_grad():
        return log_mixture(mixture.log_weights(masses.total, history), masses.log_probability)


def folds(document: Int[Tensor, " n"], count: int, seed: int) -> Int[Tensor, " n"]:
    """Return the fold of each token: documents dealt out by size; if they are few, blocks of the text in turn."""
    number, size = document.unique(return_inverse=True, return_counts=True)[1:]
    if len(size) < count:
        block = max(1, -(-len(document) // (count * BLOCKS)))
        return torch.arange(len(document)) // block % count
    fold_size, fold = [0] * count, torch.empty(len(size), dtype=torch.long)
    shuffled = torch.randperm(len(size), generator=torch.Generator().manual_seed(seed))
    for document_number in shuffled[size[shuffled].argsort(descending=True, stable=True)].tolist():
        smallest = fold_size.index(min(fold_size))
        fold[document_number] = smallest
        fold_size[smallest] += int(size[document_number])
    return fold[number]
