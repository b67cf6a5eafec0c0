"""replay of a memory whose entries are contexts that the encoded test split already holds, as TRIME's long memory.

The model's computation does not depend on this memory, so that a replay equals the run itself: perplexity is that
of the experiment's last row that reads no datastore, at its tuned temperatures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from trime.errors import UserError
from trime.memory.inference.base import Memory, ReplayableMemory, StateScope, Window
from trime.memory.slots.eviction.base import EvictionPolicy
from trime.scoring.mixture_spec import MixtureSpec
from trime.scoring.scorer import Scorer
from trime.stages.encode import Encode
from trime.stages.replay.replay import Piece, Replay, ReplayedDocument, ReplayResult
from trime.stages.scoring import Scoring, text_parts, windows_of
from trime.stages.tune import TunedRows

NO_ROW = (
    "stages=[replay] needs a row of evaluate.rows with a memory that eviction= bounds and none that reads a datastore: "
    "experiment=trime_long; or experiment=memorizing"
)


@dataclass(frozen=True, eq=False)
class ContextReplay(Replay):
    """Replays policies of a row's memory over the encoded test split."""

    encoded: Encode
    tune: TunedRows
    scoring: Scoring

    def row(self) -> tuple[MixtureSpec, str]:
        """Return the last row, at its best settings, whose memories hold the text being read, and its memory with a policy.

        UserError if there is none. A memory that is read from artefacts would cost each policy and size a search.
        """
        memories = self.tune.memories
        for row in reversed(self.tune.rows()):
            replayed = row.memories & memories.replayable.keys()
            if isinstance(row, MixtureSpec) and len(replayed) == 1 and not row.memories & memories.stored.keys():
                return replace(row, sizes=tuple(self.sizes)), replayed.pop()
        raise UserError(NO_ROW)

    def exact(self) -> bool:
        return True

    def unit(self) -> str:
        return self.encoded.corpus.metric

    def memories(self) -> list[str]:
        return [f"{self.row()[1]} memory"]

    def pieces(self, memory: str) -> list[Piece]:
        if self.encoded.windowing.sorted:
            raise UserError("stages=[replay] reads text in its order: set compatibility.sorted_windows=false")
        scope = self.tune.memories.replayable[self.row()[1]].state_scope
        return [Piece(memory, part.name, part) for part in text_parts(self.encoded, scope)]

    def documents(self, piece: Piece) -> Iterator[ReplayedDocument]:
        row, name = self.row()
        memories = self.tune.memories.open_all(self.encoded.summary(), [], row.memories)
        bounded = memories[name].state_scope != StateScope.CORPUS  # else one memory reads all documents
        windows = windows_of(self.encoded, piece.source)
        for _, group in groupby(windows, lambda window: int(window.contexts.positions.document[0]) if bounded else 0):
            yield ContextDocument([*group], row, name, memories, self.scoring.scaled_interpolation)


class ContextDocument:
    """The windows between two resets of the memory ``name``, with the attention mass that each gives to earlier contexts."""

    def __init__(self, windows: list[Window], row: MixtureSpec, name: str, memories: dict[str, Memory], scaled: bool):
        self.windows, self.row, self.name, self.memories, self.scaled = windows, row, name, memories, scaled
        memory = memories[name]
        assert isinstance(memory, ReplayableMemory)
        self.memory = memory
        lengths = torch.tensor([len(window.query.token) for window in windows])
        self.starts = lengths.cumsum(0) - lengths
        g = torch.cat([window.query.g for window in windows])
        self.mass = torch.zeros(len(windows), len(g))
        for number, (window, start) in enumerate(zip(windows, self.starts.tolist(), strict=True)):
            self.mass[number, :start] = self.memory.attention(window, g[:start]).cpu()

    def replay(self, policy: EvictionPolicy, sizes: list[int]) -> list[ReplayResult]:
        """Return the result at each size, from one pass over the document."""
        replayed = self.memory.with_policy(policy, sizes)
        scorer = Scorer([self.row], self.memories | {self.name: replayed}, self.scaled)
        mass, loss = [0.0] * len(sizes), torch.zeros(len(sizes), dtype=torch.float64)
        for step, (window, (score,)) in enumerate(scorer.score_rows(iter(self.windows))):
            loss -= score[:, 0].double().sum(-1).cpu()
            for number, position in enumerate(replayed.retained_positions(window)):
                mass[number] += float(self.mass[step, position.cpu()].sum())
        return [ReplayResult(*sums, self.mass.shape[1]) for sums in zip(mass, loss.tolist(), strict=True)]
