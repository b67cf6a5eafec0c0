"""TRIME's training memory: the other contexts of the batch, on all devices, with gradient (section 4, Eq. 5)."""

from __future__ import annotations

from collections import deque

import torch

from trime.common.choices import Metric
from trime.common.types import Contexts, Float, LogMass, Tensor, TokenPosition
from trime.token_memory.train.distributed import all_gather_varlen, gather_contexts, rank_rows
from trime.token_memory.train.objective.blockwise import blockwise_mass
from trime.token_memory.train.visibility import External, Local, Long, Nothing, Others, Visibility

VISIBLE: dict[str, type[Visibility]] = {"local": Local, "long": Long, "others": Others, "all": External}


class InBatch:
    """The contexts of the batch under a visibility; local memory is dropped with probability ``drop_local``.

    ``own_gradient_only``: contexts of other processes get no gradient, as in the published code. ``gradient`` false: none
    get any (the ablation of TRIME Table 11). ``temperature`` divides similarities further (Eq. 5 has none); ``metric``
    names the similarity. ``stale``: the number of earlier batches whose contexts the caller shall pass along with those
    of the batch, as they were then (see ``StaleContexts``; Appendix E; footnote 7). ValueError for values out of range.
    """

    def __init__(
        self,
        visibility: Visibility,
        drop_local: float = 0.0,
        own_gradient_only: bool = False,
        gradient: bool = True,
        stale: int = 0,
        temperature: float = 1.0,
        metric: Metric = "ip",
    ):
        if not 0 <= drop_local <= 1:
            raise ValueError(f"drop_local={drop_local} must be a probability: choose memory.drop_local in [0, 1]")
        if drop_local and not isinstance(visibility, External):
            raise ValueError(f"drop_local={drop_local} leaves no memory but for memory=external: set memory.drop_local=0")
        self.visibility, self.drop_local = visibility, drop_local
        if stale < 0:
            raise ValueError(
                f"stale={stale}: the number of earlier batches whose contexts are memory must be at least 0: set memory.stale"
            )
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} must be positive: set memory.temperature")
        self.own_gradient_only, self.gradient, self.stale = own_gradient_only, gradient, stale
        self.temperature, self.metric = temperature, metric

    def mass(
        self,
        query: Contexts,
        contexts: Contexts,
        divisor: Float[Tensor, " t"],
        draw: float | None = None,
        progress: float = 1.0,
    ) -> LogMass:
        """Return the mass [t n] of the batch's contexts; ``draw``: uniform in [0, 1) by seed and update, None in validation."""
        memory = gather_contexts(contexts, not self.own_gradient_only)
        if not self.gradient:
            memory = memory._replace(g=memory.g.detach())
        return blockwise_mass(
            query, memory, self.visibility_for(draw, progress), divisor * self.temperature, metric=self.metric
        )

    def visibility_for(self, draw: float | None, progress: float = 1.0) -> Visibility:
        """Return the visibility in an update with this draw; in validation (None) local memory is not dropped."""
        return self.visibility if draw is None or draw >= self.drop_local else Others()


class Drawn(InBatch):
    """In-batch memory with a visibility drawn for each update.

    ``shares``: the share of updates in which contexts see those of their segment (``local``), of their document
    (``long``), of other segments (``others``) or ``all``; in the rest they see none, and only the vocabulary trains.
    Shares change linearly to ``final`` at the end of training (None: no change). ValueError for an unknown name, a
    negative share or shares of more than 1 together. The other arguments are those of ``InBatch``.
    """

    def __init__(
        self,
        shares: dict[str, float],
        final: dict[str, float] | None = None,
        own_gradient_only: bool = False,
        gradient: bool = True,
        stale: int = 0,
        temperature: float = 1.0,
        metric: Metric = "ip",
    ):
        super().__init__(External(), 0.0, own_gradient_only, gradient, stale, temperature, metric)
        self.shares, self.final = shares, shares if final is None else final
        for name, shares in (("shares", self.shares), ("final", self.final)):
            if unknown := set(shares) - set(VISIBLE):
                raise ValueError(f"memory.{name} names {min(unknown)}: choose from {', '.join(VISIBLE)}")
            if not (all(share >= 0 for share in shares.values()) and sum(shares.values()) <= 1 + 1e-9):  # also catches NaN
                raise ValueError(f"memory.{name}={shares}: shares of the updates must be at least 0, and at most 1 together")

    def visibility_for(self, draw: float | None, progress: float = 1.0) -> Visibility:
        """Return the visibility of an update with this draw; validation (None) sees all."""
        if draw is None:
            return External()
        for name, visibility in VISIBLE.items():
            start, end = self.shares.get(name, 0.0), self.final.get(name, 0.0)
            draw -= start + progress * (end - start)
            if draw < 0:
                return visibility()
        return Nothing()


class StaleContexts:
    """The contexts of the last ``batches`` batches, without gradient."""

    def __init__(self, batches: int):
        self.batches: deque[Contexts] = deque(maxlen=batches)

    def join_and_store(self, contexts: Contexts) -> Contexts:
        """Return the stored contexts followed by those of this batch, which are then stored too."""
        joined = Contexts.concat([*self.batches, contexts]) if self.batches else contexts
        self.batches.append(contexts._replace(g=contexts.g.detach()))
        return joined

    def saved(self) -> list[list[list[Tensor]]]:
        """Return the contexts of all processes, for a checkpoint: for each batch its columns, each a list of parts by rank."""
        return [[all_gather_varlen(column) for column in (batch.g, batch.token, *batch.positions)] for batch in self.batches]

    def restore(self, saved: list[list[list[Tensor]]], rank: int, world: int, device: torch.device) -> None:
        """Restore saved contexts, of any number of processes; each process takes a share, and all see all of them."""
        for batch in saved:
            g, token, *positions = (column.to(device) for column in rank_rows(batch, rank, world))
            self.batches.append(Contexts(g, token, TokenPosition(*positions)))


def local_draw(seed: int, update: int) -> float:
    """Return the random number of an update in [0, 1), the same on every rank and after a resume."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + update) % 2**63)
    return float(torch.rand((), generator=generator, dtype=torch.float64))
