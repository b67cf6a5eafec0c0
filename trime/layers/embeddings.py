"""Input embeddings, adaptive or plain, and sinusoidal positions."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from trime.common.types import Float, Int, Tensor


def band_edges(cutoffs: list[int], vocabulary: int) -> list[tuple[int, int]]:
    """Return the bands [low, high) of a vocabulary sorted by frequency; ValueError unless cutoffs are positive and rising."""
    if sorted(set(cutoffs)) != list(cutoffs) or any(cutoff <= 0 for cutoff in cutoffs):
        raise ValueError(f"cutoffs={list(cutoffs)} must be positive and rising: correct model.embedding.cutoffs")
    edges = [0, *(cutoff for cutoff in cutoffs if cutoff < vocabulary), vocabulary]
    return list(pairwise(edges))


class AdaptiveInput(nn.Module):
    """Adaptive input representations (Baevski & Auli 2019): bands of rarer words have narrower tables.

    Band i has width ``width // factor**i`` and a projection to ``width`` without bias. With no cutoffs there is a single band:
    a usual embedding followed by a square projection. Row ``pad`` of the first table is initialized to zero and gets no
    gradient from lookups, as in fairseq; None: there is no such row.
    """

    def __init__(self, vocabulary: int, width: int, cutoffs: list[int], factor: float = 4.0, pad: int | None = None):
        super().__init__()
        self.vocabulary, self.width, self.pad = vocabulary, width, pad
        self.bands = band_edges(cutoffs, vocabulary)
        dims = [int(width // factor**i) for i in range(len(self.bands))]
        if min(dims) < 1:
            raise ValueError(f"width={width} leaves no room for {len(dims)} bands at factor={factor}: use fewer cutoffs")
        sizes = [high - low for low, high in self.bands]
        self.tables = nn.ParameterList(torch.randn(n, dim) * dim**-0.5 for n, dim in zip(sizes, dims, strict=True))
        if pad is not None:
            self.tables[0].data[pad] = 0
        self.projections = nn.ParameterList(nn.init.xavier_uniform_(torch.empty(width, dim)) for dim in dims)

    def forward(self, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b l d"]:
        """Return the embeddings of tokens, unscaled."""
        flat = tokens.flatten()
        out = self.projections[0].new_zeros(len(flat), self.width)
        for (low, high), table, projection in zip(self.bands, self.tables, self.projections, strict=True):
            pad = self.pad if low == 0 else None
            inside = ((flat >= low) & (flat < high)).nonzero().squeeze(1)
            vectors = F.linear(F.embedding(flat[inside] - low, table, pad), projection)
            out = out.to(vectors.dtype).index_copy(0, inside, vectors)
        return out.view(*tokens.shape, self.width)


class PlainInput(nn.Module):
    """A single embedding table; ``pad`` as in AdaptiveInput."""

    def __init__(self, vocabulary: int, width: int, pad: int | None = None):
        super().__init__()
        self.vocabulary, self.width = vocabulary, width
        self.table = nn.Embedding(vocabulary, width, pad, _weight=torch.randn(vocabulary, width) * width**-0.5)
        if pad is not None:
            self.table.weight.data[pad] = 0

    def forward(self, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b l d"]:
        return self.table(tokens)  # unscaled


def sinusoids(length: int, width: int, first: int) -> Float[Tensor, "l d"]:
    """Return sines, then cosines, of positions from ``first`` on; frequencies exp(-k ln 10^4 / (d/2 - 1)), as fairseq's."""
    half = width // 2
    frequency = torch.exp(torch.arange(half) * -(math.log(10_000) / max(half - 1, 1)))
    angle = torch.arange(first, first + length)[:, None] * frequency
    return nn.functional.pad(torch.cat([angle.sin(), angle.cos()], 1), (0, width % 2))
