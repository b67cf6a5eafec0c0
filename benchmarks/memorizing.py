"""What memory costs: a step of the Memorizing Transformer beside the same model without a memory layer.

Width 256, depth 6, heads 4, segment 512, batch 2, vocabulary 256, top-k 32, one memory layer, the memory full. Rows
read the Python standard library's source, byte by byte. Recall of the approximate search is that of a trained model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import torch
from torch import nn

from benchmarks.measure import RESULTS, alternately, report
from trime.data.datasets.stdlib import StandardLibrary
from trime.eviction.fifo import FIFO
from trime.models.carrying import CarryingBackbone
from trime.models.embeddings import PlainInput
from trime.models.heads import Softmax
from trime.models.kv_memory import KeyValueMemory
from trime.models.memorizing import Form, memorizing_transformer
from trime.models.network import Network
from trime.models.retrieval import Keys, Table, every, exact_top, search
from trime.models.sliding import Window

WIDTH, DEPTH, HEADS, SEGMENT, BATCH, WORDS, TOP_K = 256, 6, 4, 512, 2, 256, 32
EXACT = 4096  # entries up to which the search is exact, and candidates of a head beyond that
TRAINED, ASKED = 200, 8  # steps of training, and segments over which recall is measured
CELLS = 256  # of FAISS's inverted file


def network(size: int, remembers: bool) -> Network:
    torch.manual_seed(0)
    table = PlainInput(WORDS, WIDTH)
    memory = partial(KeyValueMemory, size=size, policy=FIFO(), top_k=TOP_K, search=kind(size), candidates=EXACT)
    layers, form = None if remembers else [], Form(normalize=True)
    backbone = memorizing_transformer(
        table, DEPTH, HEADS, 4 * WIDTH, SEGMENT, memory, Window(SEGMENT), form, memory_layers=layers
    )
    return Network(backbone, Softmax(table, tied=True))


def kind(size: int) -> str:
    return "exact" if size <= EXACT else "approximate"


class Step:
    """A step reads the next segment of each row; the memory is full before the first one that counts."""

    def __init__(self, network: Network, text: torch.Tensor, trains: bool, fill: int):
        self.network, self.text, self.number = network.train(trains), text, 0
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.state: Any = None
        self.take: Callable[[], None] = self.train if trains else torch.no_grad()(self.read)
        with torch.no_grad():
            for _ in range(fill // SEGMENT):
                self.read()

    def read(self) -> torch.Tensor:
        backbone: CarryingBackbone = self.network.backbone  # type: ignore[assignment]
        start = self.number % (self.text.shape[1] // SEGMENT - 1) * SEGMENT
        tokens, self.number = self.text[:, start : start + SEGMENT + 1], self.number + 1
        encoding, self.state = backbone(tokens[:, :-1], self.state)
        mass = self.network.vocabulary_mass(encoding.f.flatten(0, 1), tokens[:, 1:].flatten())
        return (mass.total - mass.target).mean()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.read().backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()


def recall(size: int, text: torch.Tensor) -> tuple[float, float]:
    """Of the exact top-k, the share that the search of a trained model finds, its memory full of text it has not seen.

    And the share that FAISS finds in as many entries, those of the cells whose centroids are nearest to a query.
    """
    taught = Step(network(EXACT, True).to(text.device), text, True, 0)
    for _ in range(TRAINED):
        taught.train()
    asked = network(size, True).to(text.device)
    asked.load_state_dict(taught.network.state_dict())
    step, found = Step(asked, text[:, TRAINED * SEGMENT :], False, size), Found()
    for attention in asked.backbone.attentions:  # type: ignore[union-attr]
        if attention.memory is not None:  # type: ignore[union-attr]
            attention.memory.found = partial(found.hear, attention.memory.found)  # type: ignore[union-attr]
    for _ in range(ASKED):
        step.take()
    return tuple(sum(shares) / len(shares) for shares in (found.near, found.in_cells))  # type: ignore[return-value]


class Found:
    """What a memory's search finds, beside exact search and beside cells around centroids."""

    def __init__(self) -> None:
        self.near: list[float] = []
        self.in_cells: list[float] = []

    def hear(self, search_and_attend: Callable[..., Any], query: torch.Tensor, table: Table, keys: Keys) -> torch.Tensor:
        exact, near = (search(query, given, TOP_K, exact_top).slot for given in (every(table), keys))
        self.near.append(shared(exact, near))
        if not self.in_cells:
            self.in_cells.append(shared(exact[0], torch.stack(list(map(in_cells, query[0], every(table).key[0])))))
        return search_and_attend(query, table, keys)


def in_cells(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The slots that an inverted file of 256 cells finds for one head, in as many entries as there are candidates."""
    index = faiss.index_factory(key.shape[1], f"IVF{CELLS},Flat", faiss.METRIC_INNER_PRODUCT)
    vectors = key.float().cpu().contiguous().numpy()
    index.train(vectors)
    index.add(vectors)
    index.nprobe = CELLS * EXACT // len(key)
    return torch.from_numpy(index.search(query.float().cpu().contiguous().numpy(), TOP_K)[1]).to(key.device)


def shared(exact: torch.Tensor, found: torch.Tensor) -> float:
    """The share of the exact slots that were found."""
    return float((exact[..., None] == found[..., None, :]).any(-1).float().mean())


def rows_of_text(device: torch.device) -> torch.Tensor:
    """The bytes of the training modules, a part for each row of a batch."""
    whole = b"".join(path.read_bytes() for path in StandardLibrary().files("train"))
    tokens = torch.frombuffer(bytearray(whole), dtype=torch.uint8).to(device).long()
    return tokens[: len(tokens) // BATCH * BATCH].view(BATCH, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 65536], help="entries of the memory")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    text, rows = rows_of_text(torch.device(options.device)), []
    recalls = {size: recall(size, text) if kind(size) == "approximate" else (1.0, 1.0) for size in options.sizes}
    for trains in (True, False):
        steps = {
            size: Step(network(size or EXACT, size > 0).to(text.device), text, trains, size) for size in (0, *options.sizes)
        }
        found = alternately({str(size): step.take for size, step in steps.items()}, options.rounds)
        plain, least = (found[str(size)]["median_seconds"] for size in (0, min(options.sizes)))
        for size in options.sizes:
            own = found[str(size)]
            rows.append(
                {
                    "step": "training" if trains else "evaluation",
                    "memory": size,
                    "search": kind(size),
                    "recall": round(recalls[size][0], 3),
                    "recall of cells": round(recalls[size][1], 3),
                    "plain ms": round(1e3 * plain, 1),
                    "with memory ms": round(1e3 * own["median_seconds"], 1),
                    "over plain": round(own["median_seconds"] / plain, 3),
                    f"over {min(options.sizes):,}": round(own["median_seconds"] / least, 3),
                    "peak MB": own["peak_memory_mb"],
                }
            )
    sizes = " ".join(map(str, options.sizes))
    report("memorizing", f"python -m benchmarks.memorizing --sizes {sizes} --rounds {options.rounds}", rows, options.results)


if __name__ == "__main__":
    main()
