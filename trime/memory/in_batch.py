"""TRIME's training memory: the other contexts of the same batch, on all devices, with gradient (section 4, Eq. 5)."""

from __future__ import annotations

from collections import deque

import torch

from trime.memory.distributed import all_gather_varlen, gather_contexts, rank_rows
from trime.memory.objective.blockwise import blockwise_mass
from trime.memory.visibility import External, Others, Visibility
from trime.types import Contexts, Float, Mass, Tensor, TokenPosition


class InBatch:
    """Contexts of the batch under a visibility; the local ones are dropped with probability ``drop_local``.

    ``draw``, uniform in [0, 1), comes from outside: a pure function of (seed, update). ``own_gradient_only``
    is the published code's quirk: the contexts of other processes are constants; without ``gradient`` all are
    (TRIME Table 11's ablation). Contexts of the last ``stale`` batches are memory too, as they were then (Appendix E;
    footnote 7). Similarities are divided by ``temperature`` too (Eq. 5 has none); ``metric`` says which they are.
    """

    def __init__(
        self,
        visibility: Visibility,
        drop_local: float = 0.0,
        own_gradient_only: bool = False,
        gradient: bool = True,
        stale: int = 0,
        temperature: float = 1.0,
        metric: str = "ip",
    ):
        if not 0 <= drop_local <= 1:
            raise ValueError(f"drop_local={drop_local} is a probability: choose memory.drop_local in [0, 1]")
        if drop_local and not isinstance(visibility, External):
            raise ValueError(f"drop_local={drop_local} leaves no memory but for memory=external: set memory.drop_local=0")
        self.visibility, self.drop_local = visibility, drop_local
        if stale < 0:
            raise ValueError(
                f"stale={stale}: the number of earlier batches whose contexts are memory, at least 0: mend memory.stale"
            )
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} must be positive: mend memory.temperature")
        self.own_gradient_only, self.gradient, self.stale = own_gradient_only, gradient, stale
        self.temperature, self.metric = temperature, metric

    def evidence(
        self, query: Contexts, seen: Contexts, divisor: Float[Tensor, " t"], draw: float = 1.0, progress: float = 1.0
    ) -> Mass:
        """Mass [t n] of the batch's contexts, of which ``seen`` are this process's, for the queries.

        ``progress``: of training, from 0 to 1.
        """
        memory = gather_contexts(seen, not self.own_gradient_only)
        if not self.gradient:
            memory = memory._replace(g=memory.g.detach())
        return blockwise_mass(
            query, memory, self.visibility_for(draw, progress), divisor * self.temperature, metric=self.metric
        )

    def visibility_for(self, draw: float, progress: float = 1.0) -> Visibility:
        """What queries see in an update with this draw."""
        return Others() if draw < self.drop_local else self.visibility


class StaleContexts:
    """The contexts of the last ``batches`` batches, without gradient."""

    def __init__(self, batches: int):
        self.batches: deque[Contexts] = deque(maxlen=batches)

    def join_and_store(self, seen: Contexts) -> Contexts:
        """They and those of this batch, which are kept for the next ones."""
        every = Contexts.concat([*self.batches, seen]) if self.batches else seen
        self.batches.append(seen._replace(g=seen.g.detach()))
        return every

    def saved(self) -> list[list[list[Tensor]]]:
        """Batch by batch, column by column, process by process."""
        return [[all_gather_varlen(part) for part in (own.g, own.token, *own.place)] for own in self.batches]

    def restore(self, saved: list[list[list[Tensor]]], rank: int, world: int, device: torch.device) -> None:
        """Goes on from what was saved, by however many processes: each has some, and all see them all."""
        for batch in saved:
            g, token, *place = (part.to(device) for part in rank_rows(batch, rank, world))
            self.batches.append(Contexts(g, token, TokenPosition(*place)))


def local_draw(seed: int, update: int) -> float:
    """The update's draw for dropping local memory: the same on every rank and after a resume."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + update) % 2**63)
    return float(torch.rand((), generator=generator, dtype=torch.float64))
