"""What memory costs: a step of the Memorizing Transformer beside the same model without a memory layer.

Width 256, depth 6, heads 4, segment 512, batch 2, vocabulary 256, top-k 32, one memory layer, the memory full. Rows
read the Python standard library's source, byte by byte. Recall of the approximate search is that of a trained model.
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
from trime.eviction.fifo import FIFO
from trime.models.backbones.memorizing.kv_memory import KeyValueMemory
from trime.models.backbones.memorizing.transformer import AttentionConfig, memorizing_transformer
from trime.models.backbones.stateful import StatefulBackbone
from trime.models.layers.embeddings import PlainInput
from trime.models.layers.heads import Softmax
from trime.models.layers.sliding import Window
from trime.models.layers.topk_attention import Table, TopK, all_keys, exact_top, search
from trime.models.network import Network

WIDTH, DEPTH, HEADS, SEGMENT, BATCH, WORDS, TOP_K = 256, 6, 4, 512, 2, 256, 32
EXACT, SCOUTS = 4096, 32  # entries up to which the search is exact, and candidates of a head beyond that; who choose them
TRAINED, ASKED = 100, 8  # steps of training, and segments over which recall is measured
BOUNDS = {"evaluation": 1.5, "training": 1.2}  # asked for: of a step with the smallest memory, times one without
LARGER = 1.5  # of a step with a larger memory, times one with the smallest
ENOUGH = 0.8  # recall


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
    layers, form = None if kind.size else [], AttentionConfig(normalize=True)
    backbone = memorizing_transformer(
        table, DEPTH, HEADS, 4 * WIDTH, SEGMENT, memory, Window(SEGMENT), form, memory_layers=layers
    )
    return Network(backbone, Softmax(table, tied=True))


def kinds(sizes: list[int]) -> list[Kind]:
    """Small memories are searched exactly, larger ones in both approximate ways."""
    return [Kind(size, search) for size in sizes for search in (("exact",) if size <= EXACT else ("approximate", "faiss"))]


class Steps:
    """Each reads the next segment of each row; ``fill`` entries are in the memory before the first one."""

    def __init__(self, network: Network, text: torch.Tensor, fill: int):
        self.network, self.text, self.number = network, text, 0
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.state: Any = None
        for _ in range(fill // SEGMENT):
            self.evaluation()

    @torch.no_grad()
    def evaluation(self) -> None:
        self.network.eval()
        self.read()

    def read(self) -> torch.Tensor:
        backbone: StatefulBackbone = self.network.backbone  # type: ignore[assignment]
        start = self.number % (self.text.shape[1] // SEGMENT - 1) * SEGMENT
        tokens, self.number = self.text[:, start : start + SEGMENT + 1], self.number + 1
        encoding, self.state = backbone(tokens[:, :-1], self.state)
        mass = self.network.vocabulary_mass(encoding.f.flatten(0, 1), tokens[:, 1:].flatten())
        return (mass.total - mass.target).mean()

    def training(self) -> None:
        self.network.train()
        self.optimizer.zero_grad()
        self.read().backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()


def taught(text: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights of a model that has read the beginning of a text."""
    steps = Steps(network(Kind(EXACT, "exact")).to(text.device), text, 0)
    for _ in range(TRAINED):
        steps.training()
    return steps.network.state_dict()


def filled(kind: Kind, weights: dict[str, torch.Tensor], text: torch.Tensor) -> Steps:
    """A trained model, its memory full of text that it was not trained on; the plain one is as it was made."""
    found = network(kind).to(text.device)
    if kind.size:
        found.load_state_dict(weights)
    return Steps(found, text[:, TRAINED * SEGMENT :], kind.size)


def recall(steps: Steps) -> float:
    """Of the exact top-k, the share that a model's search finds in the next segments."""
    shares: list[float] = []

    def hear(find: Callable[..., TopK], query: torch.Tensor, table: Table, *rest: Any) -> TopK:
        found = find(query, table, *rest)
        shares.append(shared(search(query, all_keys(table), TOP_K, exact_top).slot, found.slot))
        return found

    (memory,) = (own.memory for own in steps.network.backbone.attentions if own.memory is not None)  # type: ignore[union-attr]
    find = memory.retrieve
    memory.retrieve = partial(hear, find)
    for _ in range(ASKED):
        steps.evaluation()
    memory.retrieve = find
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
    parser.add_argument("--rounds", type=int, default=11)


def measure(options: argparse.Namespace) -> Measured:
    """Every kind of memory beside the plain model."""
    text, rows = rows_of_text(torch.device(options.device)), []
    plain, asked = Kind(0, "exact"), kinds(sorted(options.sizes))
    weights = taught(text)
    steps = {kind: filled(kind, weights, text) for kind in (plain, *asked)}
    recalls = {kind: recall(steps[kind]) for kind in asked}
    over = f"over {asked[0].size:,}"
    for what in ("evaluation", "training"):
        found = alternately({str(kind): getattr(own, what) for kind, own in steps.items()}, options.rounds)
        least, base = (found[str(kind)]["rounds"] for kind in (asked[0], plain))
        for kind in asked:
            own = found[str(kind)]
            row = {"step": what, "memory": kind.size, "search": kind.search, "recall": round(recalls[kind], 3)}
            row |= {"plain ms": round(1e3 * found[str(plain)]["median_seconds"], 1)}
            row |= {"with memory ms": round(1e3 * own["median_seconds"], 1)}
            row |= {"over plain": ratio(own["rounds"], base), over: ratio(own["rounds"], least)}
            rows.append(row | {"peak MB": own["peak_memory_mb"]})
    return Measured(rows, [*claims(rows, asked[0], over)])


def claims(rows: list[dict[str, Any]], small: Kind, over: str) -> Iterator[Claim]:
    """Of the smallest memory over none; of the larger ones by the faster search that finds enough, over the smallest."""
    for what, bound in BOUNDS.items():
        own = [row for row in rows if row["step"] == what]
        first = min(row["over plain"] for row in own if row["memory"] == small.size)
        yield Claim(f"a step of {what} with {small.size:,} entries over one without memory", first, bound)
        for size in sorted({row["memory"] for row in own} - {small.size}):
            enough = [row[over] for row in own if row["memory"] == size and row["recall"] >= ENOUGH]
            name = f"a step of {what} with {size:,} entries, recall at least {ENOUGH}, over one with {small.size:,}"
            yield Claim(name, min(enough, default=math.inf), LARGER)
