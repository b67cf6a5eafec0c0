"""How the probability of every next token splits between the vocabulary and each memory, and between a memory's entries.

The same mixtures as tasks/rows.py (TRIME Eq. 6, 8, 9), spread out over all tokens: for generation.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from trime.evaluation.fitted_rows import FittedRow
from trime.evaluation.rows import Row, scales
from trime.memory.base import Entries
from trime.types import Float, Int, Tensor


class Attribution(NamedTuple):
    """Probability of each token, part by part (they sum to the whole), and each entry's share of its own token's."""

    parts: dict[str, Float[Tensor, "*n v"]]
    weights: dict[str, Float[Tensor, "*n k"]]

    @property
    def whole(self) -> Float[Tensor, "*n v"]:
        """The probability of each token."""
        return functools.reduce(torch.add, self.parts.values())


def spread(
    row: Row,
    vocabulary: Float[Tensor, "*n v"],
    found: dict[str, Entries],
    width: int,
    scaled_interpolation: bool,
    gate: Float[Tensor, "*n 1"] | None = None,
) -> Attribution:
    """For a row with one choice of everything; ``vocabulary`` is each token's log-mass; ``gate`` as in Mass.

    What is of the vocabulary's size has its dtype, all else is float64.
    """
    divisors = iter(row.divisors(*scales(width, scaled_interpolation)))
    scores = scored(found, row.joint, next(divisors) if row.joint else 1.0)
    own = vocabulary.logsumexp(-1, keepdim=True).double()
    if gate is not None and scores:
        mass = torch.cat(list(scores.values()), -1).logsumexp(-1, keepdim=True)
        scale = own + gate - mass.nan_to_num(neginf=0)
        scores = {name: score + scale for name, score in scores.items()}
    total = torch.cat([own, *scores.values()], -1).logsumexp(-1, keepdim=True)
    base = (vocabulary - total.to(vocabulary)).exp()
    weights = {name: torch.zeros_like(entries.similarity, dtype=torch.float64) for name, entries in found.items()}
    weights |= {name: (score - total).exp() for name, score in scores.items()}
    for layer in row.layers:
        scores = scored(found, layer.memories, next(divisors))
        total = torch.cat(list(scores.values()), -1).logsumexp(-1, keepdim=True)
        share = torch.full_like(total, layer.share[0]).masked_fill(total.isinf(), 0)  # the memory is empty: the base remains
        base, weights = (1 - share).to(base) * base, {name: (1 - share) * weight for name, weight in weights.items()}
        for name, score in scores.items():
            weights[name] = weights[name] + share * (score - total.nan_to_num(neginf=0)).exp()
    none = torch.zeros_like(base)
    parts = {name: none.scatter_add(-1, found[name].token, weight.to(none)) for name, weight in weights.items()}
    return Attribution({"vocabulary": base} | parts, weights)


class Experts(NamedTuple):
    """What every expert of a fitted row says of the next token, and how much each entry gives to it, by memory."""

    vocabulary: Float[Tensor, "*n v"]  # probability under the vocabulary's softmax
    total: Float[Tensor, "*n e"]  # log-mass of all tokens, the vocabulary's first
    entries: dict[str, Float[Tensor, "*n e k"]]
    token: dict[str, Int[Tensor, "*n k"]]  # of each entry

    def log_probability(self, token: int) -> Float[Tensor, "*n e"]:
        """Return log P of a token under each expert."""
        parts = [self.vocabulary[..., token, None]]
        for name, share in self.entries.items():
            parts.append(share.masked_fill(self.token[name].unsqueeze(-2) != token, 0).sum(-1).to(self.vocabulary))
        return torch.cat(parts, -1).log()


def experts_of(
    row: FittedRow, vocabulary: Float[Tensor, "*n v"], found: dict[str, Entries], width: int, scaled_interpolation: bool
) -> Experts:
    """What the experts of a row say after each context; ``vocabulary`` is each token's log-mass."""
    divisors = torch.tensor(row.divisors(*scales(width, scaled_interpolation)), dtype=torch.float64, device=vocabulary.device)
    totals, entries = [vocabulary.logsumexp(-1, keepdim=True)], {}
    for name in row.joint:
        own = found[name]
        scores = own.similarity.double().unsqueeze(-2) / divisors[:, None] if own.counts is None else own.counts
        total = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
        entries[name] = (scores - total.nan_to_num(neginf=0).unsqueeze(-1)).exp()
        totals.append(total.to(vocabulary))
    return Experts(vocabulary.softmax(-1), torch.cat(totals, -1), entries, {name: found[name].token for name in row.joint})


def fitted_spread(row: FittedRow, experts: Experts, log_weights: Float[Tensor, "*n e"]) -> Attribution:
    """The same for a row with a fitted mixture, of which these are the weights after each context."""
    weights, first = log_weights.double().exp(), 1
    parts = {"vocabulary": weights[..., :1].to(experts.vocabulary) * experts.vocabulary}
    shares = {}
    for name in row.joint:
        size = experts.entries[name].shape[-2]
        own, first = weights[..., first : first + size, None], first + size
        shares[name] = (own * experts.entries[name].double()).sum(-2)
        none = torch.zeros_like(experts.vocabulary)
        parts[name] = none.scatter_add(-1, experts.token[name], shares[name].to(none))
    return Attribution(parts, shares)


def scored(found: dict[str, Entries], names: tuple[str, ...], divisor: float) -> dict[str, Float[Tensor, "*n k"]]:
    """Scores of the entries of some memories."""
    return {name: found[name].similarity.double() / divisor for name in names}
