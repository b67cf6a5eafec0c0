"""What memory costs: a step of the Memorizing Transformer beside the same model without a memory layer.

Width 256, depth 6, heads 4, segment 512, batch 2, vocabulary 256, top-k 32, one memory layer, the memory full.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import RESULTS, alternately, report
from trime.eviction.fifo import FIFO
from trime.models.carrying import CarryingBackbone
from trime.models.embeddings import PlainInput
from trime.models.heads import Softmax
from trime.models.kv_memory import KeyValueMemory
from trime.models.memorizing import Form, memorizing_transformer
from trime.models.network import Network
from trime.models.sliding import Window

WIDTH, DEPTH, HEADS, SEGMENT, BATCH, WORDS, TOP_K = 256, 6, 4, 512, 2, 256, 32


def network(size: int, remembers: bool) -> Network:
    torch.manual_seed(0)
    table = PlainInput(WORDS, WIDTH)
    memory = partial(KeyValueMemory, size=size, policy=FIFO(), top_k=TOP_K)
    backbone = memorizing_transformer(
        table, DEPTH, HEADS, 4 * WIDTH, SEGMENT, memory, Window(SEGMENT), Form(), memory_layers=None if remembers else []
    )
    return Network(backbone, Softmax(table, tied=True))


class Step:
    """One step over random bytes; the state goes on, so that the memory is full after the warm-up."""

    def __init__(self, size: int, remembers: bool, trains: bool, device: torch.device):
        self.network = network(size, remembers).to(device).train(trains)
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.state: Any = None
        self.tokens = torch.randint(WORDS, (BATCH, SEGMENT + 1), device=device)
        self.take: Callable[[], None] = self.train if trains else torch.no_grad()(self.read)
        with torch.no_grad():
            for _ in range(size // SEGMENT):
                self.read()

    def read(self) -> torch.Tensor:
        backbone: CarryingBackbone = self.network.backbone  # type: ignore[assignment]
        encoding, self.state = backbone(self.tokens[:, :-1], self.state)
        mass = self.network.vocabulary_mass(encoding.f.flatten(0, 1), self.tokens[:, 1:].flatten())
        return (mass.total - mass.target).mean()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.read().backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096], help="entries of the memory")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    rows = []
    for trains in (True, False):
        for size in options.sizes:
            steps = {name: Step(size, name == "memory", trains, torch.device(options.device)) for name in ("plain", "memory")}
            found = alternately({name: step.take for name, step in steps.items()}, options.rounds)
            ratio = found["memory"]["median_seconds"] / found["plain"]["median_seconds"]
            rows.append(
                {
                    "step": "training" if trains else "evaluation",
                    "memory": size,
                    "search": "exact",
                    "plain ms": round(1e3 * found["plain"]["median_seconds"], 1),
                    "with memory ms": round(1e3 * found["memory"]["median_seconds"], 1),
                    "ratio": round(ratio, 3),
                    "peak MB": found["memory"]["peak_memory_mb"],
                }
            )
    report("memorizing", f"python -m benchmarks.memorizing --rounds {options.rounds}", rows, options.results)


if __name__ == "__main__":
    main()
