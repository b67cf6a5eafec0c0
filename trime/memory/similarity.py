"""How alike two contexts are: ``ip``, ``l2`` or ``cosine``; all are inner products of vectors that are made of g.

    ip: q . k        l2: -|q - k|^2        cosine: d q . k / (|q| |k|)

Memories divide all of them by sqrt(d) and a temperature. TRIME has ip (section 3.1 says that others did worse).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from trime.types import Float, Tensor

METRICS = ("ip", "l2", "cosine")


def similarity(query: Float[Tensor, "*n q d"], key: Float[Tensor, "*n m d"], metric: str) -> Float[Tensor, "*n q m"]:
    """Of every query with every key."""
    if metric == "l2":  # no copy of the keys
        return 2 * query @ key.transpose(-1, -2) - query.square().sum(-1, keepdim=True) - key.square().sum(-1).unsqueeze(-2)
    query, key = as_inner_products(query, key, metric)
    return query @ key.transpose(-1, -2)


def as_inner_products(query: Float[Tensor, "*n q d"], key: Float[Tensor, "*n m d"], metric: str) -> tuple[Tensor, Tensor]:
    """Vectors whose inner products are the similarity; of the same vectors the same, but for l2."""
    if metric == "cosine":
        lengthened = normalize_keys(query)
        return lengthened, lengthened if query is key else normalize_keys(key)
    if metric == "l2":
        of_query, of_key = (-x.square().sum(-1, keepdim=True) for x in (query, key))
        ones = torch.ones_like(of_query), torch.ones_like(of_key)
        return torch.cat([2 * query, of_query, ones[0]], -1), torch.cat([key, ones[1], of_key], -1)
    if metric != "ip":
        raise ValueError(f"metric={metric}: choose one of {', '.join(METRICS)}")
    return query, key


def normalize_keys(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """At length sqrt(d), which a normalised g has."""
    return x.shape[-1] ** 0.5 * F.normalize(x, dim=-1)
