"""replay: every eviction policy and size over a recorded run, without the model; beside them the clairvoyant oracle.

Retained attention mass: of what queries give all entries of earlier segments under unlimited memory (one
softmax over them), the share that falls on entries which the policy has kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from tqdm import tqdm

from trime.eviction.base import EvictionPolicy
from trime.eviction.clairvoyant import Clairvoyant
from trime.memory.bounded import BoundedMemory
from trime.stages.artefact import Artefact, plain
from trime.stages.ledger import CONF
from trime.stages.record import Record
from trime.types import Attended, Float, Int, Tensor, UserError

ORACLE = "oracle"


class Replay(Artefact):
    """``replay.json``: retained mass by layer, policy and size."""

    kind, stage = "replay", "replay"

    def __init__(self, config: DictConfig, record: Record):
        super().__init__(config)
        self.record = record

    def needs(self) -> list[Artefact]:
        return [self.record]

    def settings(self) -> Any:
        policies = {name: plain(self.described(name)) for name in self.config.replay.policies}
        return {"policies": policies, "sizes": plain(self.config.replay.sizes), "top_k": self.top_k}

    @property
    def top_k(self) -> int:
        return int(self.config.model.backbone.memory.top_k)

    def described(self, name: str) -> DictConfig:
        """A policy as conf/eviction has it, its references resolved in this run; UserError where there is none."""
        path = CONF / "eviction" / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(other.stem for other in path.parent.glob("*.yaml")))
            raise UserError(f"replay.policies: there is no eviction={name}: choose from {known}")
        whole = OmegaConf.merge(self.config, {"eviction": None}, {"eviction": OmegaConf.load(path)})
        return whole.eviction

    def policy(self, name: str) -> EvictionPolicy:
        return instantiate(self.described(name), _convert_="all")

    def build(self, folder: Path) -> None:
        told, result = self.record.information(), []
        files = sorted(self.record.path().glob("[0-9]*.safetensors"))
        policies = {name: self.policy(name) for name in self.config.replay.policies}
        for layer in told["layers"]:
            sums: dict[tuple[str, int], float] = {}
            every = 0.0
            for file in tqdm(files, unit="document", desc=f"replay layer {layer}", mininterval=1):
                document = Document(load_file(file), layer, told["segment"], self.top_k)
                every += float(document.mass.sum())
                for name, policy in [*policies.items(), (ORACLE, Clairvoyant(document.mass, document.segment))]:
                    for size in self.config.replay.sizes:
                        sums[name, size] = sums.get((name, size), 0.0) + document.retained(policy, size)
            rows = [{"policy": name, "size": size, "retained": kept / every} for (name, size), kept in sums.items()]
            result.append({"layer": layer, "rows": rows})
        exact = len(told["layers"]) == 1 and told["as_replayed"]
        (folder / "replay.json").write_text(json.dumps({"exact": exact, "layers": result}, indent=1))

    def found(self) -> dict[str, Any]:
        return json.loads((self.path() / "replay.json").read_text())


class Document:
    """The queries and keys of one layer over a document, and what attention falls where."""

    def __init__(self, parts: dict[str, Tensor], layer: int, segment: int, top_k: int):
        self.query, self.key = (parts[f"{layer}.{name}"].float().transpose(0, 1) for name in ("query", "key"))  # [h n d]
        self.segment, self.top_k, self.length = segment, top_k, self.query.shape[1]
        self.starts = list(range(0, self.length, segment))
        self.mass = torch.stack([self.received(start) for start in self.starts])

    def received(self, start: int) -> Float[Tensor, " n"]:
        """What the queries of a segment give each entry before it, over all heads."""
        found = torch.zeros(self.length)
        if start:
            logits = self.query[:, start : start + self.segment] @ self.key[:, :start].transpose(1, 2)
            found[:start] = logits.softmax(-1).sum((0, 1))
        return found

    def retained(self, policy: EvictionPolicy, size: int) -> float:
        """The mass on entries that the policy has kept when it is given."""
        return sum(float(self.mass[step, kept].sum()) for step, kept in enumerate(self.kept(policy, size)))

    def kept(self, policy: EvictionPolicy, size: int) -> list[Int[Tensor, " m"]]:
        """Which entries each segment finds, in order of position."""
        memory, found = BoundedMemory(size, policy), []
        held = memory.empty((torch.zeros(1, 0),))
        for start in self.starts:
            position = held.ranking.position
            found.append(position[position >= 0].sort().values)
            own = torch.arange(start, min(start + self.segment, self.length))[None]
            if policy.by_attention:
                summary = policy.observe(policy.begin(held.ranking), self.block(own, position))
                held = held._replace(ranking=policy.settle(held.ranking, summary))
            held, _ = memory.insert(held, (own.float(),), own)
        return found

    def block(self, own: Int[Tensor, "_ q"], position: Int[Tensor, "_ m"]) -> Attended:
        """What a segment's queries think of the entries, and which they retrieve."""
        score = (self.query[:, own[0]] @ self.key[:, position[0].clamp(min=0)].transpose(1, 2))[None]
        score = score.masked_fill((position < 0)[:, None, None], -torch.inf)
        best = score.topk(min(self.top_k, score.shape[-1]), dim=-1).indices
        return Attended(score, own, torch.zeros_like(score, dtype=torch.bool).scatter(-1, best, True))
