"""replay of TRIME's long memory, whose entries are contexts that the encoded test split already holds.

The model's computation does not depend on this memory, so that a replay equals the run itself: perplexity is that
of the experiment's last row without external memory, at its tuned temperatures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import torch
from omegaconf import DictConfig

from trime.errors import UserError
from trime.evaluation.mixture_spec import MixtureSpec
from trime.evaluation.scorer import Scorer
from trime.eviction.base import EvictionPolicy
from trime.memory.base import StateScope, Window
from trime.memory.local import LocalMemory
from trime.memory.long import LongMemory
from trime.memory.similarity import similarity
from trime.pipeline.artefact import Artefact
from trime.pipeline.parts import RunParts
from trime.pipeline.processes import DEVICE
from trime.stages.encode import Encode
from trime.stages.eviction.replay import Piece, Replay, ReplayedDocument, ReplayResult
from trime.stages.scoring import SCORING, text_parts, windows_of
from trime.stages.tune import TunedRows
from trime.types import Float, Int, Tensor

NO_ROW = "stages=[replay] needs a row with long and without external memory: experiment=trime_long; or experiment=memorizing"


class ContextReplay(Replay):
    """Replays policies of the long memory over the encoded test split."""

    depends_on = (*Replay.depends_on, "long", "similarity", *SCORING)
    unhashed = DEVICE

    def __init__(
        self, config: DictConfig, policies: dict[str, DictConfig], encoded: Encode, tune: TunedRows, run_parts: RunParts
    ):
        super().__init__(config, policies, run_parts)
        self.encoded, self.tune = encoded, tune

    def needs(self) -> list[Artefact]:
        return [self.encoded, self.tune]

    def row(self) -> MixtureSpec:
        """Return the last row with long and without external memory, at its best settings; UserError if there is none."""
        grid_rows = [row for row in self.tune.rows() if isinstance(row, MixtureSpec)]
        rows = [row for row in grid_rows if "long" in row.memories and "external" not in row.memories]
        if not rows:
            raise UserError(NO_ROW)
        return replace(rows[-1], sizes=tuple(self.sizes))

    def exact(self) -> bool:
        return True

    def unit(self) -> str:
        return self.encoded.corpus.metric

    def memories(self) -> list[str]:
        return ["long memory"]

    def pieces(self, memory: str) -> list[Piece]:
        if self.config.compatibility.sorted_windows:
            raise UserError("stages=[replay] reads text in its order: set compatibility.sorted_windows=false")
        carried = StateScope.CORPUS if self.config.long.across_documents else StateScope.DOCUMENT
        return [Piece(memory, part.name, part) for part in text_parts(self.encoded, carried)]

    def documents(self, piece: Piece) -> Iterator[ReplayedDocument]:
        across_documents, row = self.config.long.across_documents, self.row()
        windows = windows_of(self.encoded, piece.source)
        for _, group in groupby(windows, lambda window: 0 if across_documents else int(window.contexts.positions.document[0])):
            yield ContextDocument(list(group), row, self.config)


class ContextDocument:
    """The windows between two resets of the memory, with the attention mass that each gives to earlier contexts."""

    def __init__(self, windows: list[Window], row: MixtureSpec, config: DictConfig):
        self.windows, self.row, self.config = windows, row, config
        lengths = torch.tensor([len(window.query.token) for window in windows])
        self.starts = lengths.cumsum(0) - lengths
        self.g = torch.cat([window.query.g for window in windows])
        self.mass = torch.stack([self.received_mass(number) for number in range(len(windows))]).cpu()

    def received_mass(self, number: int) -> Float[Tensor, " n"]:
        """Return the attention mass that a window's queries give each context in an unlimited memory."""
        mass, query = self.g.new_zeros(len(self.g)), self.windows[number].query.g
        overlap = 0 if self.config.long.include_window else self.windows[number].num_context
        count = max(int(self.starts[number]) - overlap, 0)
        if count:
            score = similarity(query, self.g[:count], self.config.similarity) / query.shape[1] ** 0.5
            mass[:count] = score.softmax(-1).sum(0)
        return mass

    def replay(self, policy: EvictionPolicy, sizes: list[int]) -> list[ReplayResult]:
        """Return the result at each size, from one pass over the document."""
        long, metric = self.config.long, self.config.similarity
        memory = LongMemory(sizes, policy, long.across_documents, long.include_window, metric, selective=True)
        memories = {"local": LocalMemory(metric), "long": memory}
        scorer = Scorer([self.row], memories, self.config.evaluate.scaled_interpolation)
        mass, loss = [0.0] * len(sizes), torch.zeros(len(sizes), dtype=torch.float64)
        for step, (window, (score,)) in enumerate(scorer.scores(iter(self.windows))):
            loss -= score[:, 0].double().sum(-1).cpu()
            for number, state in enumerate(memory.states_for(window)):
                position: Int[Tensor, " m"] = state.ranking.position[0].cpu()
                mass[number] += float(self.mass[step, position[position >= 0]].sum())
        return [ReplayResult(*sums, len(self.g)) for sums in zip(mass, loss.tolist(), strict=True)]
