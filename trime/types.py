"""The words every part of the suite shares: batches, contexts, encodings, masses, user errors.

Axes, everywhere: ``b`` batch rows, ``l`` segment length, ``n`` contexts being scored (flattened),
``m`` memory slots, ``k`` candidates, ``d`` width, ``h`` heads, ``v`` vocabulary, ``t`` temperatures,
``s`` memory sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class UserError(Exception):
    """A mistake that the user can mend: printed as one line, exit status 1, no traceback."""


class Batch(NamedTuple):
    """Rows of text, each inside one document (a NamedTuple, because Lightning moves those between devices).

    ``tokens`` are the inputs: the target sequence shifted right by one, ``<eos>`` first in a document.
    """

    tokens: Int[Tensor, "b l"]
    targets: Int[Tensor, "b l"]
    length: Int[Tensor, " b"]  # positions from here on are padding: never scored, never memory
    scored: Bool[Tensor, "b l"]  # false below length: context, which is memory but is not scored
    document: Int[Tensor, " b"]
    segment: Int[Tensor, " b"]
    start: Int[Tensor, " b"]  # position of the first token in its document
    fresh: Bool[Tensor, " b"]  # this row starts a document: forget everything
    source: Int[Tensor, "b s"] | None = None  # the sentences that are translated

    def to(self, device: Any) -> Batch:
        """The same on a device."""
        moved = (part if part is None else part.to(device) for part in self)
        return Batch(*moved)  # type: ignore[arg-type]


class TokenPosition(NamedTuple):
    """Where a context stands; visibilities decide by these three numbers alone."""

    document: Int[Tensor, " n"]
    segment: Int[Tensor, " n"]
    position: Int[Tensor, " n"]  # in the document, counted in tokens

    def take(self, index: Tensor | slice) -> TokenPosition:
        return TokenPosition(self.document[index], self.segment[index], self.position[index])


class Contexts(NamedTuple):
    """Memory entries, and queries to them: (g(c_j), x_j) of TRIME Eq. 2-4, with their places."""

    g: Float[Tensor, "n d"]
    token: Int[Tensor, " n"]  # the token that followed the context
    place: TokenPosition

    def take(self, index: Tensor | slice) -> Contexts:
        """The entries at an index, a mask or a slice."""
        return Contexts(self.g[index], self.token[index], self.place.take(index))

    @property
    def bytes(self) -> int:
        """Return the size of all columns."""
        return sum(column.nbytes for column in (self.g, self.token, *self.place))

    @staticmethod
    def joined(parts: list[Contexts]) -> Contexts:
        """Entries of all parts, in order."""
        places = TokenPosition(*(torch.cat(column) for column in zip(*(part.place for part in parts), strict=True)))
        return Contexts(torch.cat([p.g for p in parts]), torch.cat([p.token for p in parts]), places)


class Encoding(NamedTuple):
    """What a backbone makes of a batch."""

    f: Float[Tensor, "b l d"]  # what the output layer reads
    g: Float[Tensor, "b l d"]  # input of the last feed-forward block: what memories are keyed by


@dataclass(frozen=True)
class Mass:
    """Unnormalised log-evidence for the target and in all; leading axes broadcast (sizes, temperatures).

    ``gate``, of a vocabulary's alone: log-odds of the memories' share, where the model has learned them.
    """

    target: Float[Tensor, "*#s n"]
    total: Float[Tensor, "*#s n"]
    gate: Float[Tensor, " n"] | None = None


class Ranking(NamedTuple):
    """What an eviction policy knows of a bounded memory's entries, row by row; a row may be one head's."""

    position: Int[Tensor, "b m"]  # of the entry in its stream, -1 in an empty slot
    score: Float[Tensor, "b m"]  # float64 (positions collide in float32), -inf in an empty slot
    attended: Bool[Tensor, "b m"]  # some query's attention has changed the score
    clock: Int[Tensor, " b"]  # position of the last query, -1 before there is one
    written: Int[Tensor, " b"]  # entries that ever came to the row


@dataclass(frozen=True)
class AttentionBlock:
    """A block of queries and what they thought of the entries of a memory."""

    score: Float[Tensor, "b h q m"]  # after bias and scale, before the softmax; -inf where a query may not look
    position: Int[Tensor, "b q"]  # -1: no query
    retrieved: Bool[Tensor, "b h q m"] | None = None  # null: the memory has no top-k, all that is seen counts

    @cached_property
    def seen(self) -> Bool[Tensor, "b h q m"]:
        return (self.score > -torch.inf) & (self.position >= 0)[:, None, :, None]


def positions_of(batch: Batch) -> TokenPosition:
    """Document, segment and position of every cell of a batch, flattened row after row."""
    length = batch.tokens.shape[1]
    position = batch.start[:, None] + torch.arange(length, device=batch.start.device)
    return TokenPosition(batch.document.repeat_interleave(length), batch.segment.repeat_interleave(length), position.flatten())


def is_token(batch: Batch) -> Bool[Tensor, "b l"]:
    """True where a cell holds a token, false on padding."""
    return torch.arange(batch.tokens.shape[1], device=batch.length.device) < batch.length[:, None]


def contexts_of(batch: Batch, g: Float[Tensor, "b l d"]) -> Contexts:
    """Every cell of a batch as a context, padding included, flattened row after row."""
    return Contexts(g.flatten(0, 1), batch.targets.flatten(), positions_of(batch))


__all__ = [
    "AttentionBlock",
    "Batch",
    "Bool",
    "Contexts",
    "Encoding",
    "Float",
    "Int",
    "Mass",
    "Ranking",
    "Tensor",
    "TokenPosition",
    "UserError",
    "contexts_of",
    "is_token",
    "positions_of",
]
