"""replay: runs every eviction policy and size, and the clairvoyant oracle, over recorded text without the model.

Retained attention mass: of the mass that queries give all entries of an unlimited memory (one softmax over them), the
share on entries that the policy has kept. The memory is the one inside a model (here) or TRIME's long memory
(``context_replay``).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from trime.common.identity import Free
from trime.common.io import plain, write_json
from trime.common.progress import Progress
from trime.common.types import AttentionBlock, Float, Int, Tensor
from trime.config.folder import CONF
from trime.errors import UserError
from trime.lab.artefact import Lab
from trime.lab.engines import Advance
from trime.lab.parts import ArtefactInParts, Parts
from trime.memory.slots.bounded import BoundedMemory
from trime.memory.slots.eviction.base import EvictionPolicy, topk_mask
from trime.memory.slots.eviction.clairvoyant import Clairvoyant
from trime.stages.replay.record import Record

ORACLE = "oracle"  # the name of the clairvoyant policy in results


class ReplayResult(NamedTuple):
    """Sums over a document for one memory size: retained mass and, for the long memory, loss in nats and token count."""

    mass: float
    loss: float = 0.0
    tokens: int = 0


class ReplayedDocument(Protocol):
    """A text that policies are replayed over."""

    mass: Float[Tensor, "s n"]  # attention mass that the queries of each step give every entry
    starts: Int[Tensor, " s"]  # position of each step's first query

    def replay(self, policy: EvictionPolicy, sizes: list[int]) -> list[ReplayResult]:
        """Return the result of a policy at each memory size."""
        ...


class Piece(NamedTuple):
    """Documents that are replayed together, for one memory; ``name`` says which, as part of a file's name."""

    memory: str
    name: str
    source: Any


@dataclass(frozen=True, eq=False)
class Replay(ArtefactInParts):
    """Retained mass, and loss for the long memory, by memory, policy and size: ``replay.json``."""

    kind, format = "replay", 2
    summary_file = "replay.json"

    sizes: list[int]  # of memories, ascending
    policies: dict[str, Any]  # by name
    lab: Free[Lab]

    def policy(self, name: str) -> EvictionPolicy:
        """Return a new policy."""
        return instantiate(self.policies[name], _convert_="all")

    def open_parts(self, folder: Path) -> ReplayedPieces:
        return ReplayedPieces(self, folder)

    def build(self, folder: Path) -> None:
        parts = self.open_parts(folder)
        with Progress(total=sum(parts.sizes), unit="text", desc="replay") as bar:
            self.lab.run_parts(self, parts, bar)
        memories = [{"memory": memory, "rows": replay_rows(parts.documents(memory))} for memory in self.memories()]
        content = {"exact": self.exact(), "unit": self.unit(), "memories": memories}
        write_json(folder / "replay.json", content)

    @abstractmethod
    def exact(self) -> bool:
        """Return whether a replay makes the same decisions as a run."""

    def unit(self) -> str | None:
        """Return the unit of losses; None if there are none."""
        return None

    @abstractmethod
    def memories(self) -> list[str]:
        """Return the names of the memories that are replayed."""

    @abstractmethod
    def pieces(self, memory: str) -> list[Piece]:
        """Return all documents of a memory in pieces, in order; UserError if they cannot be replayed."""

    @abstractmethod
    def documents(self, piece: Piece) -> Iterator[ReplayedDocument]:
        """Yield the documents of a piece, in the order of the text."""


class ReplayedPieces(Parts):
    """The results of every policy and size over the documents of each piece."""

    def __init__(self, replay: Replay, folder: Path):
        self.replay, self.folder = replay, folder
        self.pieces = [piece for memory in replay.memories() for piece in replay.pieces(memory)]
        self.policies = {name: replay.policy(name) for name in replay.policies}
        self.sizes = [1] * len(self.pieces)

    def file(self, number: int) -> Path:
        memory, name, _ = self.pieces[number]
        return self.folder / f"part-{memory.replace(' ', '-')}-{name}.json"

    def make(self, number: int, advance: Advance) -> None:
        documents, sizes = [], self.replay.sizes
        for document in self.replay.documents(self.pieces[number]):
            policies = self.policies | {ORACLE: Clairvoyant(document.mass, document.starts)}
            results = {name: document.replay(policy, sizes) for name, policy in policies.items()}
            documents.append({"mass": float(document.mass.sum()), "sizes": sizes, "results": results})
        write_json(self.file(number), documents, indent=None)
        advance(1)

    def documents(self, memory: str) -> list[dict[str, Any]]:
        """Return what was made of each document of a memory, in order."""
        files = (file for piece, file in zip(self.pieces, self.files(), strict=True) if piece.memory == memory)
        return [document for file in files for document in json.loads(file.read_text())]


def replay_rows(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of every policy and size over all documents; UserError if no memory was ever used."""
    results: dict[tuple[str, int], list[ReplayResult]] = {}
    for document in documents:
        for name, by_size in document["results"].items():
            for size, result in zip(document["sizes"], by_size, strict=True):
                results.setdefault((name, size), []).append(ReplayResult(*result))
    total_mass, rows = sum(document["mass"] for document in documents), []
    if not total_mass:
        raise UserError("replay: nothing to remember, because no document is longer than a window: raise evaluate.tokens")
    for (name, size), parts in results.items():
        tokens = sum(result.tokens for result in parts)  # 0 where a replay knows no losses
        row = {"policy": name, "size": size, "retained": sum(result.mass for result in parts) / total_mass}
        rows.append(row | ({"loss": sum(result.loss for result in parts) / tokens} if tokens else {}))
    return rows


def replayed_policies(config: DictConfig) -> dict[str, Any]:
    """Return the configurations of ``replay.policies``; those with an initial score, at every c of ``replay.c``."""
    policies: dict[str, Any] = {}
    for name in config.replay.policies:
        policy = policy_config(config, name)
        if config.replay.c is None or "c" not in (policy.get("initial") or {}):
            policies[name] = policy
            continue
        for c in config.replay.c:
            policies[f"{name} c={c:g}"] = OmegaConf.merge(policy, {"initial": {"c": c}})
    return {name: plain(policy) for name, policy in policies.items()}


def policy_config(config: DictConfig, name: str) -> DictConfig:
    """Return a policy of conf/eviction, its references resolved in this run; UserError if there is none."""
    path = CONF / "eviction" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(other.stem for other in path.parent.glob("*.yaml")))
        raise UserError(f"replay.policies: there is no eviction={name}: choose from {known}")
    merged = OmegaConf.merge(config, {"eviction": None}, {"eviction": OmegaConf.load(path)})
    if getattr(get_class(merged.eviction._target_), "needs_keys", False):
        raise UserError(f"replay.policies: eviction={name} scores keys, which a recorded run lacks: leave it out")
    return merged.eviction


@dataclass(frozen=True, eq=False)
class KeyReplay(Replay):
    """Replays policies of the memory inside a model, from recorded queries and keys."""

    record: Record
    top_k: int  # entries that a query attends to

    def exact(self) -> bool:
        information = self.record.summary()
        return len(information["layers"]) == 1 and information["as_replayed"]

    def memories(self) -> list[str]:
        return [f"layer {number}" for number in self.record.summary()["layers"]]

    def pieces(self, memory: str) -> list[Piece]:
        return [Piece(memory, file.stem, file) for file in sorted(self.record.path().glob("[0-9]*.safetensors"))]

    def documents(self, piece: Piece) -> Iterator[ReplayedDocument]:
        segment = self.record.summary()["segment"]
        yield KeyDocument(load_file(piece.source), int(piece.memory.split()[-1]), segment, self.top_k)


class KeyDocument:
    """The queries and keys of one layer over a document, with the attention mass that each segment gives to earlier entries."""

    def __init__(self, parts: dict[str, Tensor], layer: int, segment: int, top_k: int):
        self.query, self.key = (parts[f"{layer}.{name}"].float().transpose(0, 1) for name in ("query", "key"))  # [h n d]
        self.segment, self.top_k, self.length = segment, top_k, self.query.shape[1]
        self.starts = torch.arange(0, self.length, segment)
        self.mass = torch.stack([self.received_mass(start) for start in self.starts.tolist()])

    def received_mass(self, start: int) -> Float[Tensor, " n"]:
        """Return the mass that the queries of a segment give each earlier entry, summed over heads."""
        mass = torch.zeros(self.length)
        if start:
            logits = self.query[:, start : start + self.segment] @ self.key[:, :start].transpose(1, 2)
            mass[:start] = logits.softmax(-1).sum((0, 1))
        return mass

    def replay(self, policy: EvictionPolicy, sizes: list[int]) -> list[ReplayResult]:
        """Return the mass on the entries that the policy holds when the queries arrive, at each size."""
        return [
            ReplayResult(sum(float(self.mass[step, p].sum()) for step, p in enumerate(self.retained_positions(policy, size))))
            for size in sizes
        ]

    def retained_positions(self, policy: EvictionPolicy, size: int) -> list[Int[Tensor, " m"]]:
        """Return the positions of the entries that each segment finds in memory, ascending."""
        memory, positions = BoundedMemory(size, policy), []
        state = memory.empty((torch.zeros(1, 0),))
        for start in self.starts.tolist():
            position = state.ranking.position
            positions.append(position[position >= 0].sort().values)
            query_position = torch.arange(start, min(start + self.segment, self.length))[None]
            if policy.uses_attention:
                score = (self.query[:, query_position[0]] @ self.key[:, position[0].clamp(min=0)].transpose(1, 2))[None]
                score = score.masked_fill((position < 0)[:, None, None], -torch.inf)
                block = AttentionBlock(score, query_position, topk_mask(score, self.top_k))
                summary = policy.observe(policy.begin(state.ranking), block)
                state = state._replace(ranking=policy.finalize(state.ranking, summary))
            state = memory.update(state, (query_position.float(),), query_position)
        return positions
