"""replay: runs every eviction policy and size, and the clairvoyant oracle, over recorded text without the model.

Retained attention mass: of the mass that queries give all entries of an unlimited memory (one softmax over them), the
share on entries that the policy has kept. The memory is the one inside a model (``KeyReplay``) or a row's memory of contexts
(``ContextReplay``).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from trime.common.identity import Free
from trime.common.io import plain, write_json
from trime.common.parts import build
from trime.common.types import AttentionBlock, Int, Tensor
from trime.config.folder import CONF
from trime.errors import UserError
from trime.lab.artefact import Lab
from trime.lab.engines import Advance
from trime.lab.parts import ArtefactInParts, Parts
from trime.memory.inference.base import Memory, ReplayableMemory, StateScope, Window
from trime.memory.slots.bounded import BoundedMemory
from trime.memory.slots.eviction.base import EvictionPolicy, topk_mask
from trime.memory.slots.eviction.clairvoyant import Clairvoyant
from trime.scoring.mixture_spec import MixtureSpec
from trime.scoring.scorer import Scorer
from trime.stages.encode import Encode
from trime.stages.replay.record import Record
from trime.stages.scoring import Scoring, text_parts, windows_of
from trime.stages.tune import TunedRows

ORACLE = "oracle"  # the name of the clairvoyant policy in results
NO_ROW = (
    "stages=[replay] needs a row of evaluate.rows with a memory that eviction= bounds and none that reads a datastore: "
    "experiment=trime_long; or experiment=memorizing"
)


class ReplayResult(NamedTuple):
    """Sums over a document for one memory size: retained mass and, for the long memory, loss in nats and token count."""

    mass: float
    loss: float = 0.0
    tokens: int = 0


class Piece(NamedTuple):
    """Documents that are replayed together, for one memory; ``name`` says which, as part of a file's name."""

    memory: str
    name: str
    source: Any


@dataclass(frozen=True, eq=False, repr=False)
class Replay(ArtefactInParts):
    """Retained mass, and loss for the long memory, by memory, policy and size: ``replay.json``."""

    kind, format = "replay", 2
    summary_file = "replay.json"

    sizes: list[int]  # of memories, ascending
    policies: dict[str, Any]  # by name
    lab: Free[Lab]

    def open_parts(self, folder: Path) -> ReplayedPieces:
        return ReplayedPieces(self, folder)

    def build(self, folder: Path) -> None:
        parts = self.open_parts(folder)
        self.make_parts(parts, "replay", "text")
        documents: dict[str, list[dict[str, Any]]] = {}  # what was made of each, by memory
        for piece, file in zip(parts.pieces, parts.files(), strict=True):
            documents.setdefault(piece.memory, []).extend(json.loads(file.read_text(encoding="utf-8")))
        memories = [{"memory": memory, "rows": replay_rows(replayed)} for memory, replayed in documents.items()]
        write_json(folder / "replay.json", self.about() | {"memories": memories})

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Return whether a replay makes the same decisions as a run, ``exact``, and the ``unit`` of its losses."""

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """Return all documents of each memory in pieces, in order; UserError if they cannot be replayed."""

    @abstractmethod
    def documents(self, piece: Piece) -> Iterator[KeyDocument | ContextDocument]:
        """Yield the documents of a piece, in the order of the text."""


class ReplayedPieces(Parts):
    """The results of every policy and size over the documents of each piece."""

    def __init__(self, replay: Replay, folder: Path):
        self.replay, self.folder, self.pieces = replay, folder, replay.pieces()
        self.policies = {name: build(policy, "replay.policies") for name, policy in replay.policies.items()}
        self.sizes = [1] * len(self.pieces)

    def file(self, number: int) -> Path:
        memory, name, _ = self.pieces[number]
        return self.folder / f"part-{memory.replace(' ', '-')}-{name}.json"

    def make(self, number: int, advance: Advance) -> None:
        documents, sizes = [], self.replay.sizes
        for document in self.replay.documents(self.pieces[number]):
            # The oracle knows the whole document's future, so that it is another policy for each.
            policies = self.policies | {ORACLE: Clairvoyant(document.mass, document.starts)}
            results = {name: document.replay(policy, sizes) for name, policy in policies.items()}
            documents.append({"mass": float(document.mass.sum()), "sizes": sizes, "results": results})
        write_json(self.file(number), documents, indent=None)
        advance(1)


def replay_rows(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of every policy and size over all documents; UserError if no memory was ever used."""
    results: dict[tuple[str, int], list[ReplayResult]] = {}
    for document in documents:
        for name, by_size in document["results"].items():
            for size, result in zip(document["sizes"], by_size, strict=True):
                results.setdefault((name, size), []).append(ReplayResult(*result))
    # Shares are of the whole text's mass, so that a long document counts for more.
    total_mass, rows = sum(document["mass"] for document in documents), []
    if not total_mass:
        raise UserError("replay: nothing to remember, because no document is longer than a window: raise evaluate.tokens")
    for (name, size), parts in results.items():
        tokens = sum(result.tokens for result in parts)  # 0 where a replay knows no losses
        row = {"policy": name, "size": size, "retained": sum(result.mass for result in parts) / total_mass}
        rows.append(row | ({"loss": sum(result.loss for result in parts) / tokens} if tokens else {}))
    return rows


def replayed_policies(config: DictConfig) -> dict[str, Any]:
    """Return the configurations of ``replay.policies``; those with an initial score, at every c of ``replay.c``.

    UserError if conf/eviction has no such policy, or if it reads keys.
    """
    policies: dict[str, Any] = {}
    # Policies come from conf/eviction by their names; eviction= itself is that of the run.
    for name in config.replay.policies:
        path = CONF / "eviction" / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(other.stem for other in path.parent.glob("*.yaml")))
            raise UserError(f"replay.policies: there is no eviction={name}: choose from {known}")
        # Merged into the run's configuration, to which its references refer.
        policy = OmegaConf.merge(config, {"eviction": None}, {"eviction": OmegaConf.load(path)}).eviction
        if getattr(get_class(policy._target_), "needs_keys", False):
            raise UserError(f"replay.policies: eviction={name} scores keys, which a recorded run lacks: leave it out")
        if config.replay.c is None or "c" not in (policy.get("initial") or {}):
            policies[name] = plain(policy)
            continue
        for c in config.replay.c:
            policies[f"{name} c={c:g}"] = plain(OmegaConf.merge(policy, {"initial": {"c": c}}))
    return policies


@dataclass(frozen=True, eq=False, repr=False)
class KeyReplay(Replay):
    """Replays policies of the memory inside a model, from recorded queries and keys."""

    record: Record
    top_k: int  # entries that a query attends to

    def about(self) -> dict[str, Any]:
        recorded = self.record.summary()
        return {"exact": len(recorded["layers"]) == 1 and recorded["as_replayed"], "unit": None}

    def pieces(self) -> list[Piece]:
        files, layers = sorted(self.record.path().glob("[0-9]*.safetensors")), self.record.summary()["layers"]
        return [Piece(f"layer {number}", file.stem, file) for number in layers for file in files]

    def documents(self, piece: Piece) -> Iterator[KeyDocument]:
        segment = self.record.summary()["segment"]
        yield KeyDocument(load_file(piece.source), int(piece.memory.split()[-1]), segment, self.top_k)


class KeyDocument:
    """The queries and keys of one layer over a document, with the attention mass that each segment gives to earlier entries."""

    def __init__(self, parts: dict[str, Tensor], layer: int, segment: int, top_k: int):
        self.query, self.key = (parts[f"{layer}.{name}"].float().transpose(0, 1) for name in ("query", "key"))  # [h n d]
        self.segment, self.top_k, self.length = segment, top_k, self.query.shape[1]
        self.starts = torch.arange(0, self.length, segment)
        self.mass = torch.zeros(len(self.starts), self.length)  # that each segment gives earlier entries, summed over heads
        for step, start in enumerate(self.starts.tolist()):
            if start:
                logits = self.query[:, start : start + segment] @ self.key[:, :start].transpose(1, 2)
                self.mass[step, :start] = logits.softmax(-1).sum((0, 1))

    def replay(self, policy: EvictionPolicy, sizes: list[int]) -> list[ReplayResult]:
        """Return the mass on the entries that the policy holds when the queries arrive, at each size."""
        return [
            ReplayResult(sum(float(self.mass[step, p].sum()) for step, p in enumerate(self.retained_positions(policy, size))))
            for size in sizes
        ]

    def retained_positions(self, policy: EvictionPolicy, size: int) -> list[Int[Tensor, " m"]]:
        """Return the positions of the entries that each segment finds in memory, ascending."""
        # The memory holds positions alone: which entries are kept does not depend on their values.
        memory, positions = BoundedMemory(size, policy), []
        state = memory.empty((torch.zeros(1, 0),))
        for start in self.starts.tolist():
            position = state.ranking.position
            positions.append(position[position >= 0].sort().values)
            query_position = torch.arange(start, min(start + self.segment, self.length))[None]
            # As in the model, a policy sees the scores of what is in memory before the segment's own entries come in.
            if policy.uses_attention:
                score = (self.query[:, query_position[0]] @ self.key[:, position[0].clamp(min=0)].transpose(1, 2))[None]
                score = score.masked_fill((position < 0)[:, None, None], -torch.inf)
                block = AttentionBlock(score, query_position, topk_mask(score, self.top_k))
                summary = policy.observe(policy.begin(state.ranking), block)
                state = state._replace(ranking=policy.finalize(state.ranking, summary))
            state = memory.update(state, (query_position.float(),), query_position)
        return positions


@dataclass(frozen=True, eq=False, repr=False)
class ContextReplay(Replay):
    """Replays policies of a row's memory over the encoded test split, as TRIME's long memory.

    What the model computes does not depend on this memory, so that a replay equals the run itself: perplexity is that of the
    experiment's last row that reads no datastore, at its tuned temperatures.
    """

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

    def about(self) -> dict[str, Any]:
        return {"exact": True, "unit": self.encoded.corpus.metric}

    def pieces(self) -> list[Piece]:
        if self.encoded.windowing.sorted:
            raise UserError("stages=[replay] reads text in its order: set compatibility.sorted_windows=false")
        name = self.row()[1]
        parts = text_parts(self.encoded, self.tune.memories.replayable[name].state_scope)
        return [Piece(f"{name} memory", part.name, part) for part in parts]

    def documents(self, piece: Piece) -> Iterator[ContextDocument]:
        # Windows up to the next reset of the memory are one document to it.
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
        # What an unlimited memory would get, of everything before the window.
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
