"""Similarity of contexts: ``ip``, ``l2`` or ``cosine``, each an inner product of vectors made from g.

    ip: q . k        l2: -|q - k|^2        cosine: d q . k / (|q| |k|)

Memories divide each by sqrt(d) and a temperature. TRIME uses ip (section 3.1 reports that others did worse).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from trime.common.choices import METRICS
from trime.common.types import Float, Tensor
from trime.errors import UserError


def similarity(query: Float[Tensor, "*n q d"], key: Float[Tensor, "*n m d"], metric: str) -> Float[Tensor, "*n q m"]:
    """Return the similarity of every query to every key; UserError for an unknown metric."""
    if metric == "l2":  # without a copy of the keys
        return 2 * query @ key.transpose(-1, -2) - query.square().sum(-1, keepdim=True) - key.square().sum(-1).unsqueeze(-2)
    query, key = as_inner_products(query, key, metric)
    return query @ key.transpose(-1, -2)


def as_inner_products(query: Float[Tensor, "*n q d"], key: Float[Tensor, "*n m d"], metric: str) -> tuple[Tensor, Tensor]:
    """Return vectors whose inner products are the similarity."""
    if metric == "cosine":
        # Equal objects give equal objects, so that products of a set with itself stay symmetric.
        normalized = normalize_keys(query)
        return normalized, normalized if query is key else normalize_keys(key)
    if metric == "l2":
        query_norm, key_norm = (-x.square().sum(-1, keepdim=True) for x in (query, key))
        ones = torch.ones_like(query_norm), torch.ones_like(key_norm)
        return torch.cat([2 * query, query_norm, ones[0]], -1), torch.cat([key, ones[1], key_norm], -1)
    if metric != "ip":
        raise UserError(f"metric={metric}: choose one of {', '.join(METRICS)}")
    return query, key


def normalize_keys(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """Return vectors scaled to length sqrt(d), the length of a layer-normalised g."""
    return x.shape[-1] ** 0.5 * F.normalize(x, dim=-1)
