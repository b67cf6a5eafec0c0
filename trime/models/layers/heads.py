"""From the output representation f to evidence for every token: adaptive or plain softmax.

A head answers with a Mass: ``total`` is the log of the mass all tokens share in Eq. 5, ``target`` the
target's part of it. Logits are made block by block and computed again in the backward pass, so that
no [n, v] tensor is held.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trime.models.layers.embeddings import AdaptiveInput, PlainInput
from trime.types import Float, Int, Mass, Tensor

CELLS = 2**23  # of logits held at a time: 32 MiB in float32


def picked(logits: Float[Tensor, "n v"], index: Int[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The chosen logit and the logsumexp of each row, in float32 at least."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(1, index[:, None]).squeeze(1), logits.logsumexp(1)


def by_blocks(
    function: Callable[..., tuple[Tensor, Tensor]], width: int, rows: Tensor, index: Tensor, *weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``function(rows, index, *weights)`` over blocks of rows of which ``width`` logits each are held."""
    size = max(1, CELLS // max(width, 1))
    if len(rows) <= size:
        return function(rows, index, *weights)
    parts = [
        checkpoint(function, block, chosen, *weights, use_reentrant=False)
        for block, chosen in zip(rows.split(size), index.split(size), strict=True)
    ]
    first, second = zip(*parts, strict=True)
    return torch.cat(first), torch.cat(second)


def linear_picked(f: Tensor, index: Tensor, weight: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Picked logits of an output matrix whose last rows may be separate class rows."""
    logits = F.linear(f, weight)
    return picked(logits if classes is None else torch.cat([logits, F.linear(f, classes)], 1), index)


class Softmax(nn.Module):
    """Plain softmax (Eq. 1), the output matrix tied to the input table or its own."""

    def __init__(self, embedding: PlainInput, tied: bool = True):
        super().__init__()
        self.vocabulary = embedding.vocabulary
        self.weight = embedding.table.weight if tied else nn.Parameter(torch.empty_like(embedding.table.weight))
        if not tied:
            nn.init.normal_(self.weight, std=embedding.width**-0.5)

    def evidence(self, f: Float[Tensor, "n d"], target: Int[Tensor, " n"]) -> Mass:
        """Mass of the vocabulary: the target's logit and the logsumexp of all."""
        return Mass(*by_blocks(linear_picked, self.vocabulary, f, target, self.weight))

    def log_probs(self, f: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Log-probabilities of every token, for generation."""
        return F.linear(f, self.weight).log_softmax(1)


class AdaptiveSoftmax(nn.Module):
    """Adaptive softmax (Grave et al. 2017), tables and projections tied to the adaptive input.

    The head holds the first band's words and one class row per tail band; ``total`` is the head's
    logsumexp T, and a tail word counts with log p + T: the vocabulary enters Eq. 5 with the mass of
    the head alone. ``tied_projections=false`` gives each tail its own projection. ``dropped_in_band`` is
    the published code's quirk: the second word of each tail (its ignore_index) counts with its class alone.
    """

    def __init__(
        self, embedding: AdaptiveInput, tied_projections: bool = True, dropout: float = 0.0, dropped_in_band: bool = False
    ):
        super().__init__()
        self.dropped_in_band = dropped_in_band
        self.bands, self.tables = embedding.bands, embedding.tables
        self.dropout = nn.Dropout(dropout)
        self.classes = nn.Parameter(torch.empty(len(self.bands) - 1, embedding.width))
        if len(self.bands) > 1:
            nn.init.xavier_uniform_(self.classes)
        self.tied, self.shared_out = tied_projections, False  # FSDP wants a gradient of every weight on every device
        own = [] if tied_projections else [self.new_projection(table, embedding.width) for table in self.tables[1:]]
        self.projections = embedding.projections if tied_projections else nn.ParameterList(own)

    @staticmethod
    def new_projection(table: Tensor, width: int) -> Tensor:
        return nn.init.xavier_uniform_(torch.empty(table.shape[1], width))

    def project(self, band: int, f: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
        """f in the width of a tail band (counted from 1)."""
        weight = self.projections[band].T if self.tied else self.projections[band - 1]
        return self.dropout(F.linear(f, weight))

    def evidence(self, f: Float[Tensor, "n d"], target: Int[Tensor, " n"]) -> Mass:
        """Mass of the vocabulary: total T of the head, target log p + T."""
        f = self.dropout(f)
        first = self.bands[0][1]
        chosen = target.clamp(max=first - 1)
        for band, (low, high) in enumerate(self.bands[1:]):
            chosen = torch.where((target >= low) & (target < high), first + band, chosen)
        words = self.tables[0]
        logit, total = by_blocks(linear_picked, first + len(self.classes), f, chosen, words, self.classes)
        for band, (low, high) in list(enumerate(self.bands))[1:]:
            member = (target >= low) & (target < high)
            if self.dropped_in_band:
                member &= target != low + 1
            inside = member.nonzero().squeeze(1)
            if len(inside) or self.shared_out:
                tail = self.project(band, f[inside])
                own, all_ = by_blocks(linear_picked, high - low, tail, target[inside] - low, self.tables[band])
                logit = logit.index_add(0, inside, own - all_)
        return Mass(logit, total)

    def log_probs(self, f: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Log-probabilities of every token, for generation."""
        first = self.bands[0][1]
        head = F.linear(f, torch.cat([self.tables[0], self.classes])).log_softmax(1)
        tails = [
            head[:, first + band - 1, None] + F.linear(self.project(band, f), self.tables[band]).log_softmax(1)
            for band in range(1, len(self.bands))
        ]
        return torch.cat([head[:, :first], *tails], 1)
