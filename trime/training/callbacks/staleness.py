"""Staleness of a key-value memory in training (Wu et al. 2022, section 3.2), measured once, before the last update.

Stored keys were computed with earlier weights. By age in segments: the distance of stored keys from the same keys under
the current weights, and the share of the entries retrieved by current queries that have this age.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from trime.common.io import write_json
from trime.common.types import Batch, Bool, Float, Int, Tensor
from trime.memory.slots.bounded import MemoryState, take_slots
from trime.models.backbones.kv_memory import KeyValueMemory
from trime.models.backbones.memorizing import KNNAttention
from trime.models.backbones.stateful import State, StatefulBackbone
from trime.models.network import Network


class StreamBatch(NamedTuple):
    """A training batch, and the stream position at which its rows began."""

    batch: Batch
    position: Int[Tensor, " b"]


class Staleness(pl.Callback):
    """Keeps the batches that the memory's keys were computed from, and writes the measurement to ``path``.

    ``steps``: batches of the whole training; ``segment``: its length in tokens; ``size``: entries of a memory.
    """

    def __init__(self, path: Path, steps: int, segment: int, size: int, backbone: StatefulBackbone):
        self.path, self.steps, self.segment = path, steps, segment
        reach = max((attention_reach(backbone, number) for number in memory_layers(backbone)), default=0)
        self.batches: deque[StreamBatch] = deque(maxlen=-(-(size + reach) // segment) + 1)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        state, network = pl_module.reader.state, pl_module.network
        if state is None or not memory_layers(network.backbone):
            return
        if batch_idx + 1 == self.steps and self.batches:
            # On every process: weights may be sharded.
            measurement = measure_staleness(network, state, list(self.batches), batch, self.segment)
            if trainer.is_global_zero:
                write_json(self.path, measurement)
        self.batches.append(StreamBatch(batch, state.position.masked_fill(batch.fresh, 0)))


def memory_layers(backbone: StatefulBackbone) -> list[int]:
    """Return the numbers of the layers with a key-value memory."""
    layers = enumerate(backbone.attentions)
    return [number for number, attention in layers if isinstance(attention, KNNAttention) and attention.memory is not None]


def attention_reach(backbone: StatefulBackbone, number: int) -> int:
    """Return how many earlier tokens a layer's key may depend on, not counting memories in lower layers."""
    return sum(attention.window.length for attention in backbone.attentions[:number] if isinstance(attention, KNNAttention))


@torch.no_grad()
def measure_staleness(
    network: Network, state: State, earlier: list[StreamBatch], batch: Batch, segment: int
) -> list[dict[str, Any]]:
    """Return entries, distance and retrieval by age, for every layer with a memory."""
    backbone: StatefulBackbone = network.backbone
    training = backbone.training
    backbone.eval()
    recomputed = backbone.initial_state(len(batch.length))._replace(position=earlier[0].position)
    for one in earlier:
        _, recomputed = network(one.batch.tokens, recomputed, one.batch.fresh)
    began = torch.stack([one.batch.fresh for one in earlier]).any(0)  # a document began in these batches
    result = []
    for number in memory_layers(backbone):
        memory: KeyValueMemory = backbone.attentions[number].memory  # type: ignore[attr-defined]
        stored, now = (memory.with_pending(one.layers[number].memory[0]) for one in (state, recomputed))
        slots: list[Tensor] = []
        memory.on_retrieved = slots.append
        network(batch.tokens, state, batch.fresh)
        memory.on_retrieved = None
        slot = slots[0].flatten(1)  # how often queries retrieve each entry; rows that start a document retrieve none
        counts = torch.zeros(len(slot), memory.memory.size, device=slot.device)
        counts.scatter_add_(1, slot, torch.ones_like(slot, dtype=counts.dtype))
        retrieved = counts.masked_fill(memory.expand_rows(batch.fresh)[:, None], 0.0)
        ages = (memory.expand_rows(state.position)[:, None] - 1 - stored.ranking.position) // segment
        ended = memory.expand_rows(batch.fresh)[:, None]  # such a row's memory is reset now
        ages = ages.masked_fill((stored.ranking.position < 0) | ended, -1)
        # Keys from here on depend only on tokens of the earlier batches.
        first = (earlier[0].position + attention_reach(backbone, number)).masked_fill(began, 0)
        distance, known = distances(stored, now, memory.expand_rows(first))
        result.append({"layer": number, "ages": by_age(ages, distance, known, retrieved)})
    backbone.train(training)
    return result


def distances(
    stored: MemoryState, now: MemoryState, first: Int[Tensor, " r"]
) -> tuple[Float[Tensor, "r m"], Bool[Tensor, "r m"]]:
    """Return |stored - now| / |now| of each stored key, and whether the same entry, from ``first`` on, was recomputed."""
    order = now.ranking.position.argsort(1)
    positions = now.ranking.position.gather(1, order).contiguous()
    index = torch.searchsorted(positions, stored.ranking.position.contiguous()).clamp(max=positions.shape[1] - 1)
    same = (positions.gather(1, index) == stored.ranking.position) & (stored.ranking.position >= first[:, None])
    keys = take_slots(now.columns[0], order.gather(1, index)).flatten(2)
    distance = (stored.columns[0].flatten(2) - keys).norm(dim=-1) / keys.norm(dim=-1).clamp(min=1e-9)
    return distance, same


def by_age(ages: Tensor, distance: Tensor, known: Tensor, retrieved: Tensor) -> list[dict[str, Any]]:
    """Return one row for each age in segments."""
    filled, rows = ages >= 0, []
    for age in ages[filled].unique().tolist():
        of_age = ages == age
        comparable = of_age & known
        rows.append(
            {
                "age": age,
                "entries": int(of_age.sum()),
                "share_stored": float(of_age.sum() / filled.sum()),
                "share_retrieved": float(retrieved[of_age].sum() / retrieved[filled].sum().clamp(min=1)),
                "distance": float(distance[comparable].mean()) if comparable.any() else None,
            }
        )
    return rows
