"""Cost of memory: a step of the Memorizing Transformer beside the same model without a memory layer.

Width 256, depth 6, heads 4, segments of 512, batch 2, vocabulary 256, top-k 32, one memory layer, whose memory is full. The
model reads the source of the Python standard library byte by byte. Recall of approximate search is measured on a trained model.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.measure import Claim, Measured, alternately, ratio
from trime.data.datasets.stdlib import StandardLibrary
from trime.kv.eviction.fifo import FIFO
from trime.layers.embeddings import PlainInput
from trime.layers.heads import Softmax
from trime.layers.sliding import SlidingWindow
from trime.layers.topk_attention import Table, TopK, all_keys, exact_top, search
from trime.models.backbones.kv_memory import KeyValueMemory
from trime.models.backbones.memorizing import AttentionConfig, memorizing_transformer
from trime.models.backbones.stateful import StatefulBackbone
from trime.models.network import Network

WIDTH, DEPTH, HEADS, SEGMENT, BATCH, WORDS, TOP_K = 256, 6, 4, 512, 2, 256, 32
EXACT, OBSERVED = 4096, 32  # largest memory with exact search, and candidates of a head beyond; queries that select them
TRAINED, ASKED = 100, 8  # training steps, and segments over which recall is measured
BOUNDS = {"evaluation": 1.5, "training": 1.2}  # of a step with the smallest memory over one without
LARGER = 1.5  # bound of a step with a larger memory over one with the smallest
ENOUGH = 0.8  # minimal recall


class Kind(NamedTuple):
    """A memory's number of entries and kind of search; no entries mean the plain model."""

    size: int
    search: str


def build_model(kind: Kind) -> Network:
    """Return a model with such a memory and random weights."""
    torch.manual_seed(0)
    table = PlainInput(WORDS, WIDTH)
    memory = partial(
        KeyValueMemory,
        size=kind.size,
        policy=FIFO(),
        top_k=TOP_K,
        search=kind.search,
        candidates=EXACT,
        observation_queries=OBSERVED,
    )
    layers: list[int] | None = None if kind.size else []
    attention = AttentionConfig(normalize=True)
    backbone = memorizing_transformer(
        table, DEPTH, HEADS, 4 * WIDTH, SEGMENT, memory, SlidingWindow(SEGMENT), attention, memory_layers=layers
    )
    return Network(backbone, Softmax(table, tied=True))


def kinds(sizes: list[int]) -> list[Kind]:
    """Return the kinds of memory: small ones with exact search, larger ones with both approximate searches."""
    return [Kind(size, search) for size in sizes for search in (("exact",) if size <= EXACT else ("approximate", "faiss"))]


class Steps:
    """Steps of a model, each over the next segment of each row, after ``fill`` tokens that fill the memory."""

    def __init__(self, network: Network, text: torch.Tensor, fill: int):
        self.network, self.text, self.number = network, text, 0
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.state: Any = None
        for _ in range(fill // SEGMENT):
            self.evaluation()

    @torch.no_grad()
    def evaluation(self) -> None:
        """Read a segment without gradients."""
        self.network.eval()
        self.read()

    def read(self) -> torch.Tensor:
        """Read the next segment; return the mean loss."""
        backbone: StatefulBackbone = self.network.backbone
        start = self.number % (self.text.shape[1] // SEGMENT - 1) * SEGMENT
        tokens, self.number = self.text[:, start : start + SEGMENT + 1], self.number + 1
        encoding, self.state = backbone(tokens[:, :-1], self.state)
        mass = self.network.vocabulary_mass(encoding.f.flatten(0, 1), tokens[:, 1:].flatten())
        return (mass.total - mass.target).mean()

    def training(self) -> None:
        """Take a training step on the next segment."""
        self.network.train()
        self.optimizer.zero_grad()
        self.read().backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()


def train_weights(text: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weights of a model trained on the beginning of a text."""
    steps = Steps(build_model(Kind(EXACT, "exact")).to(text.device), text, 0)
    for _ in range(TRAINED):
        steps.training()
    return steps.network.state_dict()


def steps_with_full_memory(kind: Kind, weights: dict[str, torch.Tensor], text: torch.Tensor) -> Steps:
    """Return steps of a trained model whose memory is full of text that it was not trained on; the plain model is untrained."""
    model = build_model(kind).to(text.device)
    if kind.size:
        model.load_state_dict(weights)
    return Steps(model, text[:, TRAINED * SEGMENT :], kind.size)


def recall(steps: Steps) -> float:
    """Return the share of the exact top-k entries that a model's search retrieves in the next segments."""
    shares: list[float] = []

    def recording(retrieve: Callable[..., TopK], query: torch.Tensor, table: Table, *rest: Any) -> TopK:
        top = retrieve(query, table, *rest)
        shares.append(overlap(search(query, all_keys(table), TOP_K, exact_top).slot, top.slot))
        return top

    (memory,) = (layer.memory for layer in steps.network.backbone.attentions if layer.memory is not None)
    retrieve = memory.retrieve
    memory.retrieve = partial(recording, retrieve)
    for _ in range(ASKED):
        steps.evaluation()
    memory.retrieve = retrieve
    return sum(shares) / len(shares)


def overlap(exact: torch.Tensor, retrieved: torch.Tensor) -> float:
    """Return the share of the exact slots that were retrieved."""
    return float((exact[..., None] == retrieved[..., None, :]).any(-1).float().mean())


def load_text(device: torch.device) -> torch.Tensor:
    """Return the bytes of the training modules, split into the rows of a batch."""
    content = b"".join(path.read_bytes() for path in StandardLibrary().files("train"))
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device).long()
    return tokens[: len(tokens) // BATCH * BATCH].view(BATCH, -1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 65536], help="entries of the memory")
    parser.add_argument("--rounds", type=int, default=11)


def measure(options: argparse.Namespace) -> Measured:
    """Measure every kind of memory beside the plain model."""
    text, rows = load_text(torch.device(options.device)), []
    plain, memories = Kind(0, "exact"), kinds(sorted(options.sizes))
    weights = train_weights(text)
    steps = {kind: steps_with_full_memory(kind, weights, text) for kind in (plain, *memories)}
    recalls = {kind: recall(steps[kind]) for kind in memories}
    over = f"over {memories[0].size:,}"
    for what in ("evaluation", "training"):
        results = alternately({str(kind): getattr(of_kind, what) for kind, of_kind in steps.items()}, options.rounds)
        smallest, base = (results[str(kind)]["rounds"] for kind in (memories[0], plain))
        for kind in memories:
            result = results[str(kind)]
            row = {"step": what, "memory": kind.size, "search": kind.search, "recall": round(recalls[kind], 3)}
            row |= {"plain ms": round(1e3 * results[str(plain)]["median_seconds"], 1)}
            row |= {"with memory ms": round(1e3 * result["median_seconds"], 1)}
            row |= {"over plain": ratio(result["rounds"], base), over: ratio(result["rounds"], smallest)}
            rows.append(row | {"peak MB": result["peak_memory_mb"]})
    return Measured(rows, [*claims(rows, memories[0], over)])


def claims(rows: list[dict[str, Any]], small: Kind, over: str) -> Iterator[Claim]:
    """Yield the claims on the smallest memory over none, and on larger ones, with the fastest search that has enough recall."""
    for what, bound in BOUNDS.items():
        of_step = [row for row in rows if row["step"] == what]
        first = min(row["over plain"] for row in of_step if row["memory"] == small.size)
        yield Claim(f"a step of {what} with {small.size:,} entries over one without memory", first, bound)
        for size in sorted({row["memory"] for row in of_step} - {small.size}):
            enough = [row[over] for row in of_step if row["memory"] == size and row["recall"] >= ENOUGH]
            name = f"a step of {what} with {size:,} entries, recall at least {ENOUGH}, over one with {small.size:,}"
            yield Claim(name, min(enough, default=math.inf), LARGER)
