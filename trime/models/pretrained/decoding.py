"""What the layers of an EvictingCache work out once for all of them: which tokens are padding, and whom a new token evicts."""

from __future__ import annotations

import torch

from trime.errors import UserError
from trime.memory.bounded import MemoryState, SlotWrites
from trime.models.attendre import Attendre
from trime.types import AttentionBlock, Bool, Float, Int, Ranking, Tensor


class Padding:
    """The padding of the texts that were read, and the positions of the newest tokens."""

    def __init__(self) -> None:
        self.seen = 0  # tokens, padding included
        self.mask: Bool[Tensor, "b s"] | None = None  # False for padding; None: there is none
        self.position: Int[Tensor, "b l"] = torch.empty(0, 0, dtype=torch.long)  # of the newest tokens, -1 for padding

    def read(self, query: Float[Tensor, "b h l d"], mask: Tensor | None) -> Int[Tensor, " b"] | None:
        """Take note of the newest tokens, those of the queries, and of the padding mask [b seen] if there is one.

        Returns the lengths of the rows where the mask hides tokens that were read, as rows of a batch that ended early: they
        are forgotten. UserError if the mask changes anything else.
        """
        before, length, hidden = self.seen, query.shape[2], None
        if mask is None and self.mask is not None:
            raise UserError("the texts read so far have padding: pass their attention_mask, with ones for the new tokens")
        if mask is not None and mask.dim() != 2:
            raise UserError("attention_mask: pass a row for each text [b l], with zeros for padding")
        if mask is None or (self.mask is None and bool(mask.all())):
            self.position = torch.arange(before, before + length, device=query.device).expand(len(query), -1)
        else:
            mask = mask.bool()
            if before:
                earlier, known = mask[:, :before], torch.ones_like(mask[:, :before]) if self.mask is None else self.mask
                hidden = None if torch.equal(earlier, known) else hidden_from(earlier, known)
            self.mask = None if bool(mask.all()) else mask
            self.position = (mask.long().cumsum(1) - 1).masked_fill(~mask, -1)[:, -length:]
        self.seen = before + length
        return hidden

    def take_rows(self, rows: Int[Tensor, " r"]) -> None:
        """Continue with these rows, each as often as it is named."""
        self.mask = None if self.mask is None else self.mask[rows.to(self.mask.device)]


def hidden_from(mask: Bool[Tensor, "b s"], known: Bool[Tensor, "b s"]) -> Int[Tensor, " b"]:
    """Return the lengths of rows without the newest tokens that a mask hides; UserError if it changes anything else."""
    same = (mask.cumsum(1) == known.cumsum(1)) & known
    if not bool((same | ~mask).all()):
        raise UserError("attention_mask changes what was read: of earlier tokens only a row's newest can be hidden later")
    return mask.sum(1)


class Decoding:
    """The rankings of all layers as the rows of one, while full memories read token by token: each evicts once for all.

    What a token's queries attend to changes the ranking when the next token is inserted.
    """

    def __init__(self, memory: Attendre, states: list[MemoryState]):
        self.memory, self.layers = memory, len(states)
        self.ranking = Ranking(*(torch.cat(parts) for parts in zip(*(state.ranking for state in states), strict=True)))
        self.blocks: list[AttentionBlock] = []  # of the layers that have attended since the last token was inserted
        self.at: Tensor = states[0].ranking.position[:, :0]  # the position of the token
        self.writes: list[SlotWrites] = []
        self.positions: list[Tensor] = []  # of each layer's entries in the slots that are used
        self.has_gaps = False  # some of these are empty, or the token is padding

    def insert(self, position: Int[Tensor, "b 1"]) -> None:
        """Make room for the next token, or for none where its position is -1: ``writes`` says where each layer has it."""
        self.learn()
        memory, rows, self.at = self.memory.keys, len(position), position
        writes, self.ranking = memory.plan(self.ranking, (), position.repeat(self.layers, 1))
        self.writes = writes.split(self.layers, rows * memory.size, rows)
        used = self.ranking.position[:, : self.memory.used_slots(self.ranking)]
        self.has_gaps = bool((used < 0).any()) or bool((position < 0).any())
        self.positions = list(used.chunk(self.layers))

    def learn(self) -> None:
        """Let the policy see the queries of all layers."""
        if not self.blocks:
            return
        score, position = (torch.cat([getattr(block, name) for block in self.blocks]) for name in ("score", "position"))
        hits = [block.retrieved for block in self.blocks if block.retrieved is not None]
        block = AttentionBlock(score, position, torch.cat(hits) if hits else None)
        self.ranking, self.blocks = self.memory.learn(self.ranking, block), []

    def rankings(self) -> list[Ranking]:
        """Return the ranking of each layer."""
        self.learn()
        return [Ranking(*parts) for parts in zip(*(column.chunk(self.layers) for column in self.ranking), strict=True)]
