"""What reading long inputs costs: time linear and memory constant in the length, beside full attention and keeping everything.

A Llama with random weights (width 128, 2 layers, 4 heads) reads random tokens in chunks of 128. Then what a query memory
costs at the end: flushed in one step, or drained in chunks of padding, over M and N.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.measure import Claim, Measured, alternately
from trime.eviction.base import EvictionPolicy
from trime.eviction.fifo import FIFO
from trime.eviction.initial import BelowMean
from trime.eviction.lra_sum import LRASum
from trime.eviction.reading import Raw
from trime.memory.bounded import BoundedMemory
from trime.models.attendre import Attendre
from trime.models.pretrained.reader import LongReader
from trime.models.pretrained.rope import RopeDecoder
from trime.models.pretrained.small import Small

WORDS, WIDTH, LAYERS, HEADS, LONGEST = 1000, 128, 2, 4, 512
CHUNK, TOP_K, SIZE = 128, 128, 2048
Read = Callable[[torch.Tensor], Any]


def decoder(device: str) -> Any:
    torch.manual_seed(0)
    return Small("decoder", WIDTH, LAYERS, HEADS, LONGEST).build(WORDS, 1, 0).eval().to(device)


def policies() -> dict[str, EvictionPolicy]:
    return {"fifo": FIFO(), "lra_sum": LRASum(BelowMean(2.0), Raw())}


def reads(model: Any, memory: Attendre, end: str, tokens: torch.Tensor) -> None:
    """The whole input through memories of one kind."""
    family = RopeDecoder(model)
    reader, position = LongReader(family, [memory] * LAYERS, CHUNK), torch.arange(tokens.shape[1], device=tokens.device)[None]
    for _ in reader.feed(tokens, position):
        pass
    for _ in reader.end(end):
        pass


@torch.no_grad()
def full(model: Any, tokens: torch.Tensor) -> None:
    """The model's own code over the whole input."""
    model.model(tokens, use_cache=False)


def ways(model: Any, length: int) -> dict[str, Read]:
    """How an input may be read."""
    kept = {name: Attendre(BoundedMemory(SIZE, policy), 0, TOP_K, True) for name, policy in policies().items()}
    kept["everything kept"] = Attendre(BoundedMemory(length, FIFO()), 0, TOP_K, True)
    bounded: dict[str, Read] = {name: partial(reads, model, memory, "flush") for name, memory in kept.items()}
    return bounded | {"full attention": partial(full, model)}


def measured(step: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Alone, so that peaks are its own."""
    gc.collect()
    return alternately({"step": step}, rounds, warmup=0)["step"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536], help="tokens of the input")
    parser.add_argument("--whole", type=int, default=16384, help="longest input that is kept or attended to whole")
    parser.add_argument("--queries", type=int, nargs="+", default=[128, 512, 1024], help="N, with M twice as large")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Measured:
    """Every length and way, then the query memory."""
    model, rows = decoder(options.device), []
    tokens = torch.randint(2, WORDS, (1, max(options.lengths)), device=options.device)
    for length in options.lengths:
        for name, read in ways(model, length).items():
            if name not in policies() and length > options.whole:  # a token's cost grows with the length: hours
                continue
            found = measured(partial(read, tokens[:, :length]), options.rounds if name in policies() else 1)
            rows.append(row(f"read, {name}", length, SIZE if name in policies() else length, "", found))
    length = min(options.lengths)
    for queries in options.queries:
        for end in ("flush", "drain"):
            memory = Attendre(BoundedMemory(2 * queries, FIFO()), queries, TOP_K)
            found = measured(partial(reads, model, memory, end, tokens[:, :length]), options.rounds)
            rows.append(row(f"both ways, {end}", length, 2 * queries, queries, found))
    return Measured(rows, claims(rows))


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Bounded memories: time linear in the length, memory constant; the worst policy, the longest input over the shortest."""
    read = {name: [row for row in rows if row["what"] == f"read, {name}"] for name in policies()}
    ends = [(min(own, key=lambda row: row["tokens"]), max(own, key=lambda row: row["tokens"])) for own in read.values()]
    return [
        Claim("seconds a token, longest input over shortest", max(a["tokens/s"] / b["tokens/s"] for a, b in ends), 1.1),
        Claim("peak memory, longest input over shortest", max(b["peak MB"] / a["peak MB"] for a, b in ends), 1.1),
    ]


def row(what: str, length: int, size: int, queries: int | str, found: dict[str, float]) -> dict[str, Any]:
    seconds = found["median_seconds"]
    return {
        "what": what,
        "tokens": length,
        "M": size,
        "N": queries,
        "seconds": round(seconds, 2),
        "tokens/s": round(length / seconds),
        "peak MB": found["peak_memory_mb"],
    }
