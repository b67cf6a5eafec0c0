"""Contexts of random words, and the equations written out over them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trime.common.types import Contexts, LogMass, TokenPosition
from trime.token_memory.train.visibility import Everything, External, Local, Long, Nothing, Others, Previous, SameDocument

VISIBILITIES = [Local(), Long(), Previous(), Others(), External(), Everything(), Nothing(), SameDocument()]


WORDS = 11


def contexts(seed: int, rows: list[tuple[int, int, int]], width: int = 6) -> Contexts:
    """Random contexts of rows (document, start, length), in float64."""
    torch.manual_seed(seed)
    places = [(document, row, start + i) for row, (document, start, length) in enumerate(rows) for i in range(length)]
    columns = torch.tensor(places, dtype=torch.long).reshape(-1, 3).T
    g = torch.randn(len(places), width, dtype=torch.float64)
    return Contexts(g, torch.randint(WORDS, (len(places),)), TokenPosition(*columns))


ROWS = [(0, 0, 7), (0, 7, 7), (0, 14, 4), (1, 0, 5), (1, 20, 6), (2, 3, 1)]


def visible(visibility: object, query: Contexts, memory: Contexts) -> list[list[bool]]:
    """The sentences of the paper, pair by pair."""
    sentence = {
        "Local": lambda back, same, before: back == 0 and before,
        "Long": lambda back, same, before: same and before,
        "Previous": lambda back, same, before: same and before and back in (0, 1),
        "Others": lambda back, same, before: back != 0,
        "External": lambda back, same, before: back != 0 or before,
        "Everything": lambda back, same, before: True,
        "Nothing": lambda back, same, before: False,
        "SameDocument": lambda back, same, before: same,
    }[type(visibility).__name__]
    places = [list(zip(*(column.tolist() for column in part.positions), strict=True)) for part in (query, memory)]
    return [[sentence(q[1] - m[1], m[0] == q[0], m[2] < q[2]) for m in places[1]] for q in places[0]]


def eq5(logits: Tensor, query: Contexts, memory: Contexts, visibility: object, divisor: float) -> Tensor:
    """P(w | c_i) for every context and word by Eq. 5 / 6, in plain numbers."""
    mask, tokens = visible(visibility, query, memory), memory.token.tolist()
    products = (query.g @ memory.g.T).tolist()
    rows = []
    for i, row in enumerate(logits.tolist()):
        weights = [math.exp(logit) for logit in row]
        for j, token in enumerate(tokens):
            if mask[i][j]:
                weights[token] += math.exp(products[i][j] / divisor)
        rows.append([weight / sum(weights) for weight in weights])
    return torch.tensor(rows, dtype=torch.float64)


def direct_mass(query: Contexts, memory: Contexts, visibility: object, divisor: Tensor) -> LogMass:
    """The whole matrix at once; rows without an entry are -inf and carry no gradient."""
    mask = torch.tensor(visible(visibility, query, memory))
    hit = mask & (query.token[:, None] == memory.token)
    scores = (query.g @ memory.g.T) / divisor[:, None, None]

    def masked(mask: Tensor) -> Tensor:
        some = mask.any(1)
        filled = scores.masked_fill(~mask, -math.inf)
        return torch.where(some, torch.where(some[:, None], filled, 0.0).logsumexp(-1), -math.inf)

    return LogMass(masked(hit), masked(mask))
