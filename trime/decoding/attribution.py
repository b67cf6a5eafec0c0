"""Attribute the probability of every next token to the vocabulary, to each memory, and to a memory's entries.

The mixtures are those of a row (TRIME Eq. 6, 8, 9), evaluated for all tokens: for generation.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from trime.common.types import Float, Int, Tensor
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec, scales
from trime.token_memory.test.base import Entries


class Attribution(NamedTuple):
    """Each token's probability by component (the components sum to it), and each entry's contribution to its own token."""

    parts: dict[str, Float[Tensor, "*n v"]]
    weights: dict[str, Float[Tensor, "*n k"]]

    @property
    def probability(self) -> Float[Tensor, "*n v"]:
        return functools.reduce(torch.add, self.parts.values())


def grid_attribution(
    row: MixtureSpec,
    vocabulary: Float[Tensor, "*n v"],
    entries: dict[str, Entries],
    width: int,
    scaled_interpolation: bool,
    gate: Float[Tensor, "*n 1"] | None = None,
) -> Attribution:
    """Attribute probabilities under a row of single values; ``vocabulary``: each token's log-mass; ``gate``: as in LogMass."""
    divisors = iter(row.divisors(*scales(width, scaled_interpolation)))
    scores = entry_scores(entries, row.joint, next(divisors) if row.joint else 1.0)
    # All but tensors of the vocabulary's size are float64: the components must sum to the probability.
    vocabulary_mass = vocabulary.logsumexp(-1, keepdim=True).double()
    if gate is not None and scores:
        mass = torch.cat(list(scores.values()), -1).logsumexp(-1, keepdim=True)
        scale = vocabulary_mass + gate - mass.nan_to_num(neginf=0)
        scores = {name: score + scale for name, score in scores.items()}
    total = torch.cat([vocabulary_mass, *scores.values()], -1).logsumexp(-1, keepdim=True)
    base = (vocabulary - total.to(vocabulary)).exp()
    weights = {name: torch.zeros_like(memory.similarity, dtype=torch.float64) for name, memory in entries.items()}
    weights |= {name: (score - total).exp() for name, score in scores.items()}
    for interpolation in row.interpolations:
        scores = entry_scores(entries, interpolation.memories, next(divisors))
        total = torch.cat(list(scores.values()), -1).logsumexp(-1, keepdim=True)
        share = torch.full_like(total, interpolation.share[0]).masked_fill(total.isinf(), 0)  # an empty memory has no share
        base, weights = (1 - share).to(base) * base, {name: (1 - share) * weight for name, weight in weights.items()}
        for name, score in scores.items():
            weights[name] = weights[name] + share * (score - total.nan_to_num(neginf=0)).exp()
    zeros = torch.zeros_like(base)
    parts = {name: zeros.scatter_add(-1, entries[name].token, weight.to(zeros)) for name, weight in weights.items()}
    return Attribution({"vocabulary": base} | parts, weights)


class ExpertDistributions(NamedTuple):
    """The next-token distribution of every expert of a fitted row, and each entry's share of it, by memory."""

    vocabulary: Float[Tensor, "*n v"]  # probability under the vocabulary's softmax
    total: Float[Tensor, "*n e"]  # log-mass of all tokens, the vocabulary's first
    entries: dict[str, Float[Tensor, "*n e k"]]
    token: dict[str, Int[Tensor, "*n k"]]  # of each entry

    def log_probability(self, token: int) -> Float[Tensor, "*n e"]:
        """Return log P of a token under each expert."""
        columns = [self.vocabulary[..., token, None]]
        for name, share in self.entries.items():
            columns.append(share.masked_fill(self.token[name].unsqueeze(-2) != token, 0).sum(-1).to(self.vocabulary))
        return torch.cat(columns, -1).log()


def expert_distributions(
    row: FittedMixtureSpec,
    vocabulary: Float[Tensor, "*n v"],
    entries: dict[str, Entries],
    width: int,
    scaled_interpolation: bool,
) -> ExpertDistributions:
    """Return the distributions of a row's experts after each context; ``vocabulary`` is each token's log-mass."""
    divisors = torch.tensor(row.divisors(*scales(width, scaled_interpolation)), dtype=torch.float64, device=vocabulary.device)
    totals, shares = [vocabulary.logsumexp(-1, keepdim=True)], {}
    for name in row.memory_order:
        memory = entries[name]
        scores = memory.similarity.double().unsqueeze(-2) / divisors[:, None] if memory.counts is None else memory.counts
        total = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
        shares[name] = (scores - total.nan_to_num(neginf=0).unsqueeze(-1)).exp()
        totals.append(total.to(vocabulary))
    tokens = {name: entries[name].token for name in row.memory_order}
    return ExpertDistributions(vocabulary.softmax(-1), torch.cat(totals, -1), shares, tokens)


def fitted_attribution(row: FittedMixtureSpec, experts: ExpertDistributions, log_weights: Float[Tensor, "*n e"]) -> Attribution:
    """Attribute probabilities under a fitted mixture that gives the experts ``log_weights`` after each context."""
    weights, first = log_weights.double().exp(), 1
    parts = {"vocabulary": weights[..., :1].to(experts.vocabulary) * experts.vocabulary}
    entry_weights = {}
    for name in row.memory_order:
        size = experts.entries[name].shape[-2]
        memory_weights, first = weights[..., first : first + size, None], first + size
        entry_weights[name] = (memory_weights * experts.entries[name].double()).sum(-2)
        zeros = torch.zeros_like(experts.vocabulary)
        parts[name] = zeros.scatter_add(-1, experts.token[name], entry_weights[name].to(zeros))
    return Attribution(parts, entry_weights)


def entry_scores(entries: dict[str, Entries], names: tuple[str, ...], divisor: float) -> dict[str, Float[Tensor, "*n k"]]:
    """Return the scaled similarities of the entries of the named memories; counts have no temperature."""
    scores = {name: entries[name].similarity.double() for name in names}
    return {name: score / (divisor if entries[name].counts is None else 1.0) for name, score in scores.items()}
