"""What memory costs: a step of the Memorizing Transformer beside the same model without a memory layer.

Width 256, depth 6, heads 4, segment 512, batch 2, vocabulary 256, top-k 32, one memory layer, the memory full. Rows
read the Python standard library's source, byte by byte. Recall of the approximate search is that of a trained model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.measure import Claim, Measured, alternately
from trime.data.datasets.stdlib import StandardLibrary
from trime.eviction.fifo import FIFO
from trime.models.carrying import CarryingBackbone
from trime.models.embeddings import PlainInput
from trime.models.heads import Softmax
from trime.models.kv_memory import KeyValueMemory
from trime.models.memorizing import Form, memorizing_transformer
from trime.models.network import Network
from trime.models.retrieval import Found, Table, every, exact_top, search
from trime.models.sliding import Window

WIDTH, DEPTH, HEADS, SEGMENT, BATCH, WORDS, TOP_K = 256, 6, 4, 512, 2, 256, 32
EXACT, SCOUTS = 4096, 32  # entries up to which the search is exact, and candidates of a head beyond that; who choose them
TRAINED, ASKED = 200, 8  # steps of training, and segments over which recall is measured


class Kind(NamedTuple):
    """Of memory: its entries, and how they are searched; none is the plain model."""

    size: int
    search: str


def network(kind: Kind) -> Network:
    torch.manual_seed(0)
    table = PlainInput(WORDS, WIDTH)
    memory = partial(
        KeyValueMemory, size=kind.size, policy=FIFO(), top_k=TOP_K, search=kind.search, candidates=EXACT, scouts=SCOUTS
    )
    layers, form = None if kind.size else [], Form(normalize=True)
    backbone = memorizing_transformer(
        table, DEPTH, HEADS, 4 * WIDTH, SEGMENT, memory, Window(SEGMENT), form, memory_layers=layers
    )
    return Network(backbone, Softmax(table, tied=True))


def kinds(sizes: list[int]) -> list[Kind]:
    """Small memories are searched exactly, larger ones in both approximate ways."""
    return [Kind(size, search) for size in sizes for search in (("exact",) if size <= EXACT else ("approximate", "faiss"))]


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


def taught(text: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights of a model that has read the beginning of a text."""
    step = Step(network(Kind(EXACT, "exact")).to(text.device), text, True, 0)
    for _ in range(TRAINED):
        step.train()
    return step.network.state_dict()


def recall(kind: Kind, weights: dict[str, torch.Tensor], text: torch.Tensor) -> float:
    """Of the exact top-k, the share that the search of a trained model finds, its memory full of text it has not seen."""
    if kind.search == "exact":
        return 1.0
    asked = network(kind).to(text.device)
    asked.load_state_dict(weights)
    step, shares = Step(asked, text[:, TRAINED * SEGMENT :], False, kind.size), []

    def hear(find: Callable[..., Found], query: torch.Tensor, table: Table, *rest: Any) -> Found:
        found = find(query, table, *rest)
        shares.append(shared(search(query, every(table), TOP_K, exact_top).slot, found.slot))
        return found

    for attention in asked.backbone.attentions:  # type: ignore[union-attr]
        if attention.memory is not None:  # type: ignore[union-attr]
            attention.memory.found = partial(hear, attention.memory.found)  # type: ignore[union-attr]
    for _ in range(ASKED):
        step.take()
    return sum(shares) / len(shares)


def shared(exact: torch.Tensor, found: torch.Tensor) -> float:
    """The share of the exact slots that were found."""
    return float((exact[..., None] == found[..., None, :]).any(-1).float().mean())


def rows_of_text(device: torch.device) -> torch.Tensor:
    """The bytes of the training modules, a part for each row of a batch."""
    whole = b"".join(path.read_bytes() for path in StandardLibrary().files("train"))
    tokens = torch.frombuffer(bytearray(whole), dtype=torch.uint8).to(device).long()
    return tokens[: len(tokens) // BATCH * BATCH].view(BATCH, -1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 65536], help="entries of the memory")
    parser.add_argument("--rounds", type=int, default=15)


def measure(options: argparse.Namespace) -> Measured:
    """Every kind of memory beside the plain model."""
    text, rows = rows_of_text(torch.device(options.device)), []
    plain, asked = Kind(0, "exact"), kinds(options.sizes)
    weights = taught(text)
    recalls = {kind: recall(kind, weights, text) for kind in asked}
    for trains in (True, False):
        steps = {kind: Step(network(kind).to(text.device), text, trains, kind.size) for kind in (plain, *asked)}
        found = alternately({str(kind): step.take for kind, step in steps.items()}, options.rounds)
        least, base = (found[str(kind)]["median_seconds"] for kind in (asked[0], plain))
        for kind in asked:
            own = found[str(kind)]
            rows.append(
                {
                    "step": "training" if trains else "evaluation",
                    "memory": kind.size,
                    "search": kind.search,
                    "recall": round(recalls[kind], 3),
                    "plain ms": round(1e3 * base, 1),
                    "with memory ms": round(1e3 * own["median_seconds"], 1),
                    "over plain": round(own["median_seconds"] / base, 3),
                    f"over {asked[0].size:,}": round(own["median_seconds"] / least, 3),
                    "peak MB": own["peak_memory_mb"],
                }
            )
    over = f"over {asked[0].size:,}"
    best = min((row[over] for row in rows if row["step"] == "training" and row["memory"] == max(options.sizes)), default=None)
    claim = f"a training step with {max(options.sizes):,} entries over one with {asked[0].size:,}, the faster search"
    return Measured(rows, [Claim(claim, best, 1.1)])
