"""Types shared by the whole package: batches, contexts, encodings, masses.

Axes that mean the same in all signatures: ``b`` batch rows, ``l`` segment length, ``n`` contexts being scored (flattened),
``m`` memory slots, ``d`` width, ``h`` heads, ``v`` vocabulary. Other letters are local to a module or a function: ``t`` is
mostly temperatures, ``s`` memory sizes, ``k`` candidates, ``e`` experts or a second width, ``q`` queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Batch(NamedTuple):
    """Rows of text, each within one document (a NamedTuple, which Lightning can move between devices).

    ``tokens`` are the inputs: the targets shifted right by one, with ``<eos>`` before a document's first token.
    """

    tokens: Int[Tensor, "b l"]
    targets: Int[Tensor, "b l"]
    length: Int[Tensor, " b"]  # later cells are padding: never scored, never memory
    scored: Bool[Tensor, "b l"]  # false before length: context, which is memory but not scored
    document: Int[Tensor, " b"]
    segment: Int[Tensor, " b"]
    start: Int[Tensor, " b"]  # position of the first token in its document
    fresh: Bool[Tensor, " b"]  # the row starts a document: state and memories are reset
    source: Int[Tensor, "b s"] | None = None  # tokens of the source sentences, in translation

    def to(self, device: Any) -> Batch:
        """Return the batch on a device."""
        columns = (column if column is None else column.to(device) for column in self)
        return Batch(*columns)  # type: ignore[arg-type]


class TokenPosition(NamedTuple):
    """The position of each context; visibilities depend on these three numbers alone."""

    document: Int[Tensor, " n"]
    segment: Int[Tensor, " n"]
    position: Int[Tensor, " n"]  # in the document, counted in tokens

    def take(self, index: Tensor | slice) -> TokenPosition:
        """Return the positions at an index, a mask or a slice."""
        return TokenPosition(self.document[index], self.segment[index], self.position[index])


class Contexts(NamedTuple):
    """Memory entries or queries: (g(c_j), x_j) of TRIME Eq. 2-4, with their positions."""

    g: Float[Tensor, "n d"]
    token: Int[Tensor, " n"]  # the token that followed the context
    positions: TokenPosition

    def take(self, index: Tensor | slice) -> Contexts:
        """Return the contexts at an index, a mask or a slice."""
        return Contexts(self.g[index], self.token[index], self.positions.take(index))

    @property
    def bytes(self) -> int:
        """Return the size of all columns in bytes."""
        return sum(column.nbytes for column in (self.g, self.token, *self.positions))

    @staticmethod
    def concat(parts: list[Contexts]) -> Contexts:
        """Concatenate contexts, in order."""
        positions = TokenPosition(*(torch.cat(column) for column in zip(*(part.positions for part in parts), strict=True)))
        return Contexts(torch.cat([p.g for p in parts]), torch.cat([p.token for p in parts]), positions)


class Encoding(NamedTuple):
    """The hidden states of a batch, as a backbone returns them."""

    f: Float[Tensor, "b l d"]  # input of the output layer
    g: Float[Tensor, "b l d"]  # input of the last feed-forward block: the memories' keys


@dataclass(frozen=True)
class LogMass:
    """Unnormalised log-mass of the target and of all tokens; leading axes broadcast (sizes, temperatures).

    ``gate``, of a vocabulary's mass only: learned log-odds of the memories' share, where the model has a gate.
    """

    target: Float[Tensor, "*#s n"]
    total: Float[Tensor, "*#s n"]
    gate: Float[Tensor, " n"] | None = None


class Ranking(NamedTuple):
    """The statistics by which an eviction policy ranks the entries of a bounded memory; a row may be a single head's."""

    position: Int[Tensor, "b m"]  # of the entry in its stream, -1 in an empty slot
    score: Float[Tensor, "b m"]  # float64 (positions collide in float32), -inf in an empty slot
    attended: Bool[Tensor, "b m"]  # the score has been updated by some query's attention
    clock: Int[Tensor, " b"]  # position of the last query, -1 before there is one
    written: Int[Tensor, " b"]  # entries ever written to the row


@dataclass(frozen=True)
class AttentionBlock:
    """A block of queries and their attention scores over the entries of a memory."""

    score: Float[Tensor, "b h q m"]  # after bias and scale, before the softmax; -inf where masked
    position: Int[Tensor, "b q"]  # -1: no query
    retrieved: Bool[Tensor, "b h q m"] | None = None  # None: the memory has no top-k, every visible entry counts

    @cached_property
    def visible(self) -> Bool[Tensor, "b h q m"]:
        """Return True where a query may attend to an entry."""
        return (self.score > -torch.inf) & (self.position >= 0)[:, None, :, None]

    def take(self, query: Int[Tensor, "b k"]) -> AttentionBlock:
        """Return the block of some queries of each row, by their numbers."""

        def taken(column: Tensor) -> Tensor:
            return column.gather(2, query[:, None, :, None].expand(-1, column.shape[1], -1, column.shape[3]))

        retrieved = None if self.retrieved is None else taken(self.retrieved)
        return AttentionBlock(taken(self.score), self.position.gather(1, query), retrieved)


def positions_of(batch: Batch) -> TokenPosition:
    """Return the position of every cell of a batch, padding included, flattened row by row."""
    length = batch.tokens.shape[1]
    position = batch.start[:, None] + torch.arange(length, device=batch.start.device)
    return TokenPosition(batch.document.repeat_interleave(length), batch.segment.repeat_interleave(length), position.flatten())


def is_token(batch: Batch) -> Bool[Tensor, "b l"]:
    """Return a mask that is true for tokens and false for padding."""
    return torch.arange(batch.tokens.shape[1], device=batch.length.device) < batch.length[:, None]


def contexts_of(batch: Batch, g: Float[Tensor, "b l d"]) -> Contexts:
    """Return every cell of a batch as a context, padding included, flattened row by row."""
    return Contexts(g.flatten(0, 1), batch.targets.flatten(), positions_of(batch))


__all__ = [
    "AttentionBlock",
    "Batch",
    "Bool",
    "Contexts",
    "Encoding",
    "Float",
    "Int",
    "LogMass",
    "Ranking",
    "Tensor",
    "TokenPosition",
    "contexts_of",
    "is_token",
    "positions_of",
]
