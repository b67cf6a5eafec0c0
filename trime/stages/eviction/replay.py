"""replay: every eviction policy and size over recorded text, without the model; beside them the clairvoyant oracle.

Retained attention mass: of what queries give all entries under unlimited memory (one softmax over them), the
share that falls on entries which the policy has kept. The subjects are the memory inside a model (here) and
TRIME's long memory (replay_contexts).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from tqdm import tqdm

from trime.eviction.base import EvictionPolicy, topk_mask
from trime.eviction.clairvoyant import Clairvoyant
from trime.io import plain
from trime.memory.bounded import BoundedMemory
from trime.pipeline.artefact import Artefact
from trime.pipeline.compose import CONF
from trime.stages.eviction.record import Record
from trime.types import AttentionBlock, Float, Int, Tensor, UserError

ORACLE = "oracle"


class ReplayResult(NamedTuple):
    """What a memory of one size makes of a document: the mass on what it holds; where there is one, the loss in nats."""

    mass: float
    loss: float = 0.0
    tokens: int = 0


class Document(Protocol):
    """A text that policies are replayed over. ``mass``: what the queries of each step give every entry."""

    mass: Float[Tensor, "s n"]
    starts: Int[Tensor, " s"]  # position of each step's first query

    def replay(self, policy: EvictionPolicy, sizes: list[int]) -> list[ReplayResult]: ...


class Replay(Artefact):
    """``replay.json``: by memory, policy and size, the retained mass and, where there is one, the loss."""

    kind, stage = "replay", "replay"

    def settings(self) -> Any:
        policies = {name: plain(described) for name, described in self.policies.items()}
        return {"policies": policies, "sizes": self.sizes}

    @property
    def sizes(self) -> list[int]:
        return sorted(set(plain(self.config.replay.sizes)))

    @cached_property
    def policies(self) -> dict[str, DictConfig]:
        """The policies, at every c of ``replay.c`` where they have one."""
        found: dict[str, Any] = {}
        for name in self.config.replay.policies:
            policy = self.described(name)
            if self.config.replay.c is None or "c" not in (policy.get("initial") or {}):
                found[name] = policy
                continue
            for c in self.config.replay.c:
                found[f"{name} c={c:g}"] = OmegaConf.merge(policy, {"initial": {"c": c}})
        return found

    def described(self, name: str) -> DictConfig:
        """A policy as conf/eviction has it, its references resolved in this run; UserError where there is none."""
        path = CONF / "eviction" / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(other.stem for other in path.parent.glob("*.yaml")))
            raise UserError(f"replay.policies: there is no eviction={name}: choose from {known}")
        whole = OmegaConf.merge(self.config, {"eviction": None}, {"eviction": OmegaConf.load(path)})
        return whole.eviction

    def policy(self, name: str) -> EvictionPolicy:
        return instantiate(self.policies[name], _convert_="all")

    def build(self, folder: Path) -> None:
        policies = {name: self.policy(name) for name in self.policies}
        memories = [{"memory": memory, "rows": self.rows(memory, policies)} for memory in self.memories()]
        content = {"exact": self.exact(), "unit": self.unit(), "memories": memories}
        (folder / "replay.json").write_text(json.dumps(content, indent=1))

    def rows(self, memory: str, policies: dict[str, EvictionPolicy]) -> list[dict[str, Any]]:
        """Every policy and size over all documents."""
        kept: dict[tuple[str, int], list[ReplayResult]] = {}
        every = 0.0
        for document in tqdm(self.documents(memory), unit="document", desc=f"replay {memory}", mininterval=1):
            every += float(document.mass.sum())
            for name, policy in [*policies.items(), (ORACLE, Clairvoyant(document.mass, document.starts))]:
                for size, found in zip(self.sizes, document.replay(policy, self.sizes), strict=True):
                    kept.setdefault((name, size), []).append(found)
        if not every:
            raise UserError("replay: nothing to remember, for no document is longer than a window: raise evaluate.tokens")
        return [{"policy": name, "size": size, **told(found, every)} for (name, size), found in kept.items()]

    def exact(self) -> bool:
        """A replay decides as a run would."""
        raise NotImplementedError

    def unit(self) -> str | None:
        """What losses are told in; None where there are none."""
        return None

    def memories(self) -> list[str]:
        """What is replayed, one after the other."""
        raise NotImplementedError

    def documents(self, memory: str) -> Iterator[Document]:
        raise NotImplementedError

    def results(self) -> dict[str, Any]:
        return self.read("replay.json")


def told(kept: list[ReplayResult], every: float) -> dict[str, float]:
    """The share of the mass, and the loss a token."""
    tokens = sum(one.tokens for one in kept)
    share = {"retained": sum(one.mass for one in kept) / every}
    return share | ({"loss": sum(one.loss for one in kept) / tokens} if tokens else {})


class KeyReplay(Replay):
    """The memory inside a model, from recorded queries and keys."""

    def __init__(self, config: DictConfig, record: Record):
        super().__init__(config)
        self.record = record

    def needs(self) -> list[Artefact]:
        return [self.record]

    def settings(self) -> Any:
        return super().settings() | {"top_k": self.top_k}

    @property
    def top_k(self) -> int:
        return int(self.config.model.backbone.memory.top_k)

    def exact(self) -> bool:
        information = self.record.information()
        return len(information["layers"]) == 1 and information["as_replayed"]

    def memories(self) -> list[str]:
        return [f"layer {number}" for number in self.record.information()["layers"]]

    def documents(self, memory: str) -> Iterator[Document]:
        segment = self.record.information()["segment"]
        for file in sorted(self.record.path().glob("[0-9]*.safetensors")):
            yield KeyDocument(load_file(file), int(memory.split()[-1]), segment, self.top_k)


class KeyDocument:
    """The queries and keys of one layer over a document, and what attention falls where."""

    def __init__(self, parts: dict[str, Tensor], layer: int, segment: int, top_k: int):
        self.query, self.key = (parts[f"{layer}.{name}"].float().transpose(0, 1) for name in ("query", "key"))  # [h n d]
        self.segment, self.top_k, self.length = segment, top_k, self.query.shape[1]
        self.starts = torch.arange(0, self.length, segment)
        self.mass = torch.stack([self.received_mass(start) for start in self.starts.tolist()])

    def received_mass(self, start: int) -> Float[Tensor, " n"]:
        """What the queries of a segment give each entry before it, over all heads."""
        found = torch.zeros(self.length)
        if start:
            logits = self.query[:, start : start + self.segment] @ self.key[:, :start].transpose(1, 2)
            found[:start] = logits.softmax(-1).sum((0, 1))
        return found

    def replay(self, policy: EvictionPolicy, sizes: list[int]) -> list[ReplayResult]:
        """The mass on what the policy has kept when it is given."""
        return [
            ReplayResult(sum(float(self.mass[step, kept].sum()) for step, kept in enumerate(self.kept(policy, size))))
            for size in sizes
        ]

    def kept(self, policy: EvictionPolicy, size: int) -> list[Int[Tensor, " m"]]:
        """Which entries each segment finds, in order of position."""
        memory, found = BoundedMemory(size, policy), []
        held = memory.empty((torch.zeros(1, 0),))
        for start in self.starts.tolist():
            position = held.ranking.position
            found.append(position[position >= 0].sort().values)
            own = torch.arange(start, min(start + self.segment, self.length))[None]
            if policy.uses_attention:
                summary = policy.observe(policy.begin(held.ranking), self.block(own, position))
                held = held._replace(ranking=policy.finalize(held.ranking, summary))
            held = memory.update(held, (own.float(),), own)
        return found

    def block(self, own: Int[Tensor, "_ q"], position: Int[Tensor, "_ m"]) -> AttentionBlock:
        """What a segment's queries think of the entries, and which they retrieve."""
        score = (self.query[:, own[0]] @ self.key[:, position[0].clamp(min=0)].transpose(1, 2))[None]
        score = score.masked_fill((position < 0)[:, None, None], -torch.inf)
        return AttentionBlock(score, own, topk_mask(score, self.top_k))
