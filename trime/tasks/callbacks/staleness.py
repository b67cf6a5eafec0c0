"""How stale a memory of keys is in training (Wu et al. 2022, section 3.2): measured once, before the last update.

Entries were stored under the weights of their time. By age, in segments: how far a stored key lies from the
same key under today's weights, and which share of what today's queries retrieve is of that age.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from trime.memory.bounded import MemoryState, take_slots
from trime.models.backbones.memorizing.kv_memory import KeyValueMemory
from trime.models.backbones.memorizing.transformer import Attention
from trime.models.backbones.stateful import State, StatefulBackbone
from trime.models.network import Network
from trime.types import Batch, Bool, Float, Int, Tensor


class Read(NamedTuple):
    """A batch of the training, and the position at which its rows began."""

    batch: Batch
    position: Int[Tensor, " b"]


class Staleness(pl.Callback):
    """Keeps the batches whose keys a memory may hold, and those which these keys come from; writes ``path``."""

    def __init__(self, path: Path, steps: int, segment: int, size: int, backbone: StatefulBackbone):
        self.path, self.steps, self.segment = path, steps, segment
        reach = max((reach_of(backbone, number) for number in remembering(backbone)), default=0)
        self.kept: deque[Read] = deque(maxlen=-(-(size + reach) // segment) + 1)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        state, network = pl_module.reader.state, pl_module.network
        if state is None or not remembering(network.backbone):
            return
        if batch_idx + 1 == self.steps and self.kept:
            found = measured(network, state, list(self.kept), batch, self.segment)  # by all: weights may be shared out
            if trainer.is_global_zero:
                partial = self.path.with_name(self.path.name + ".partial")
                partial.write_text(json.dumps(found, indent=1))
                partial.replace(self.path)
        self.kept.append(Read(batch, state.position.masked_fill(batch.fresh, 0)))


def remembering(backbone: StatefulBackbone) -> list[int]:
    """The layers that have a memory of keys and values."""
    every = enumerate(backbone.attentions)
    return [number for number, attention in every if isinstance(attention, Attention) and attention.memory is not None]


def reach_of(backbone: StatefulBackbone, number: int) -> int:
    """How many tokens before it a layer's key may come from, memories in lower layers aside."""
    return sum(attention.window.length for attention in backbone.attentions[:number] if isinstance(attention, Attention))


@torch.no_grad()
def measured(network: Network, state: State, kept: list[Read], batch: Batch, segment: int) -> list[dict[str, Any]]:
    """For every layer with a memory: entries, distance and retrieval by age."""
    backbone: StatefulBackbone = network.backbone  # type: ignore[assignment]
    training = backbone.training
    backbone.eval()
    again = backbone.start(len(batch.length))._replace(position=kept[0].position)
    for read in kept:
        _, again = network(read.batch.tokens, again, read.batch.fresh)
    began = torch.stack([read.batch.fresh for read in kept]).any(0)  # the document did, among these batches
    result = []
    for number in remembering(backbone):
        memory: KeyValueMemory = backbone.attentions[number].memory  # type: ignore[attr-defined]
        stored, now = (memory.with_pending(one.layers[number].memory[0]) for one in (state, again))
        retrieved = retrieved_from(network, memory, state, batch)
        ages = (memory.expand_rows(state.position)[:, None] - 1 - stored.ranking.position) // segment
        ended = memory.expand_rows(batch.fresh)[:, None]  # what such a row holds is forgotten now
        ages = ages.masked_fill((stored.ranking.position < 0) | ended, -1)
        sure = (kept[0].position + reach_of(backbone, number)).masked_fill(began, 0)  # all that a key comes from was read
        distance, known = distances(stored, now, memory.expand_rows(sure))
        result.append({"layer": number, "ages": by_age(ages, distance, known, retrieved)})
    backbone.train(training)
    return result


def distances(
    stored: MemoryState, now: MemoryState, sure: Int[Tensor, " r"]
) -> tuple[Float[Tensor, "r m"], Bool[Tensor, "r m"]]:
    """|stored - now| / |now| of each stored key, and whether the same entry was read again."""
    order = now.ranking.position.argsort(1)
    places = now.ranking.position.gather(1, order).contiguous()
    at = torch.searchsorted(places, stored.ranking.position.contiguous()).clamp(max=places.shape[1] - 1)
    same = (places.gather(1, at) == stored.ranking.position) & (stored.ranking.position >= sure[:, None])
    keys = take_slots(now.columns[0], order.gather(1, at)).flatten(2)
    apart = (stored.columns[0].flatten(2) - keys).norm(dim=-1) / keys.norm(dim=-1).clamp(min=1e-9)
    return apart, same


def retrieved_from(network: Network, memory: KeyValueMemory, state: State, batch: Batch) -> Float[Tensor, "r m"]:
    """How often each stored entry is retrieved by the batch's queries; rows that start a document ask nothing."""
    told: list[Tensor] = []
    memory.on_retrieved = told.append
    network(batch.tokens, state, batch.fresh)
    memory.on_retrieved = None
    (slot,) = told
    counts = torch.zeros(len(slot), memory.memory.size, device=slot.device)
    counts.scatter_add_(1, slot.flatten(1), torch.ones_like(slot.flatten(1), dtype=counts.dtype))
    return counts.masked_fill(memory.expand_rows(batch.fresh)[:, None], 0.0)


def by_age(ages: Tensor, distance: Tensor, known: Tensor, retrieved: Tensor) -> list[dict[str, Any]]:
    """One entry for each age, in segments."""
    filled, found = ages >= 0, []
    for age in ages[filled].unique().tolist():
        of_age = ages == age
        sure = of_age & known
        found.append(
            {
                "age": age,
                "entries": int(of_age.sum()),
                "share_stored": float(of_age.sum() / filled.sum()),
                "share_retrieved": float(retrieved[of_age].sum() / retrieved[filled].sum().clamp(min=1)),
                "distance": float(distance[sure].mean()) if sure.any() else None,
            }
        )
    return found
