"""Cost of reading long inputs: time linear and memory constant in the length, beside full attention and unbounded memories.

A Llama with random weights (width 128, 2 layers, 4 heads) reads random tokens in chunks of 128. Queries attend to all entries
of a first-in-first-out memory, and to the best 128 of each head where the policy uses attention. The last rows measure a query
memory, which is flushed in one step or drained in chunks of padding, over M and N.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.measure import Claim, Measured, alternately
from trime.eviction.base import EvictionPolicy
from trime.eviction.fifo import FIFO
from trime.eviction.initial import BelowMean
from trime.eviction.lfa import LFA
from trime.eviction.lra_sum import LRASum
from trime.eviction.score_transform import Raw
from trime.memory.bounded import BoundedMemory
from trime.models.attendre import Attendre
from trime.models.pretrained.reader import LongReader
from trime.models.pretrained.rope import RopeDecoder
from trime.models.pretrained.small import Small

WORDS, WIDTH, LAYERS, HEADS, LONGEST = 1000, 128, 2, 4, 512
CHUNK, TOP_K, SIZE = 128, 128, 2048
UNBOUNDED, FULL = "everything kept", "full attention"
LEAST = "attention alone, by PyTorch"
Read = Callable[[torch.Tensor], Any]


def decoder(device: str) -> Any:
    """Return a small Llama with random weights."""
    torch.manual_seed(0)
    return Small("decoder", WIDTH, LAYERS, HEADS, LONGEST).build(WORDS, 1, 0).eval().to(device)


def policies() -> dict[str, EvictionPolicy]:
    """Return the eviction policies that are measured."""
    return {"fifo": FIFO(), "lra_sum": LRASum(BelowMean(2.0), Raw()), "lfa": LFA(BelowMean(2.0), Raw())}


def read_with_memory(model: Any, memory: Attendre, end: str, tokens: torch.Tensor) -> None:
    """Read an input in chunks, with such a memory in every layer."""
    family = RopeDecoder(model)
    reader, position = LongReader(family, [memory] * LAYERS, CHUNK), torch.arange(tokens.shape[1], device=tokens.device)[None]
    for _ in reader.feed(tokens, position):
        pass
    for _ in reader.end(end):
        pass


@torch.no_grad()
def attend_in_chunks(tokens: torch.Tensor) -> None:
    """Attend to as many entries as a memory and a chunk have, for each chunk and layer of an input: the least cost."""
    shape = (1, HEADS, -1, WIDTH // HEADS)
    query, key, value = (torch.randn(1, length, WIDTH, device=tokens.device) for length in (CHUNK, *2 * [SIZE + CHUNK]))
    parts = [part.unflatten(2, (HEADS, -1)).transpose(1, 2).contiguous().view(shape) for part in (query, key, value)]
    for _ in range(LAYERS * tokens.shape[1] // CHUNK):
        F.scaled_dot_product_attention(*parts)


@torch.no_grad()
def read_with_full_attention(model: Any, tokens: torch.Tensor) -> None:
    """Read an input at once, with the model's own code."""
    model.model(tokens, use_cache=False)


def readers(model: Any, length: int) -> dict[str, Read]:
    """Return every way to read an input of this length."""
    memories = {
        name: Attendre(BoundedMemory(SIZE, policy), 0, TOP_K if policy.uses_attention else None, True)
        for name, policy in policies().items()
    }
    memories[UNBOUNDED] = Attendre(BoundedMemory(length, FIFO()), 0, None, True)
    bounded: dict[str, Read] = {name: partial(read_with_memory, model, memory, "flush") for name, memory in memories.items()}
    return bounded | {FULL: partial(read_with_full_attention, model), LEAST: attend_in_chunks}


def measure_alone(step: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Measure a step by itself, so that the peak of memory is that of the step."""
    gc.collect()
    return alternately({"step": step}, rounds, warmup=0)["step"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 65536], help="lengths of the input, in tokens"
    )
    parser.add_argument("--whole", type=int, default=16384, help="longest input for unbounded memories")
    parser.add_argument("--queries", type=int, nargs="+", default=[128, 512, 1024], help="values of N; M is twice as large")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Measured:
    """Measure every way to read inputs of every length, then the query memory."""
    model, rows = decoder(options.device), []
    tokens = torch.randint(2, WORDS, (1, max(options.lengths)), device=options.device)
    for name in policies():  # these take least space, so that they come first; lengths take turns
        reads = {length: partial(readers(model, length)[name], tokens[:, :length]) for length in options.lengths}
        for length, result in alternately(reads, options.rounds, warmup=0).items():
            rows.append(row(f"read, {name}", length, SIZE, "", result))
    for length in options.lengths:
        for name in (UNBOUNDED, FULL, LEAST):
            if name == UNBOUNDED and length > options.whole:  # would take hours
                continue
            read = partial(readers(model, length)[name], tokens[:, :length])
            result = measure_alone(read, 1 if name == UNBOUNDED else options.rounds)
            rows.append(row(f"read, {name}", length, length, "", result))
    length = min(options.lengths)
    for queries in options.queries:
        for end in ("flush", "drain"):
            memory = Attendre(BoundedMemory(2 * queries, FIFO()), queries, TOP_K)
            result = measure_alone(partial(read_with_memory, model, memory, end, tokens[:, :length]), options.rounds)
            rows.append(row(f"both ways, {end}", length, 2 * queries, queries, result))
    return Measured(rows, claims(rows))


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims: linear time and constant space once a memory is full; ratios to full attention and attention."""
    lengths = sorted({row["tokens"] for row in rows})
    full = [length for length in lengths if length >= 8 * SIZE] or lengths
    by_policy = {name: [row for row in rows if row["what"] == f"read, {name}" and row["tokens"] in full] for name in policies()}
    ends = [[choose(rows, key=lambda row: row["tokens"]) for choose in (min, max)] for rows in by_policy.values()]
    seconds = {(row["what"].removeprefix("read, "), row["tokens"]): row["seconds"] for row in rows}
    longest = max(tokens for _, tokens in seconds)
    bounds = [("fifo", 8192, 1.0), *((name, 16384, 1.0) for name in policies()), *((name, 65536, 1 / 3) for name in policies())]
    return [
        Claim("seconds a token, longest input over shortest", max(a["tokens/s"] / b["tokens/s"] for a, b in ends), 1.1),
        Claim("peak memory, longest input over shortest", max(b["peak MB"] / a["peak MB"] for a, b in ends), 1.1),
        *(
            Claim(
                f"seconds, {name} over full attention, {tokens:,} tokens", seconds[name, tokens] / seconds[FULL, tokens], bound
            )
            for name, tokens, bound in bounds
            if (name, tokens) in seconds
        ),
        Claim("seconds, fifo over attention alone", seconds["fifo", longest] / seconds[LEAST, longest], 2.0),
    ]


def row(what: str, length: int, size: int, queries: int | str, result: dict[str, float]) -> dict[str, Any]:
    """Return a row of the results."""
    seconds = result["median_seconds"]
    return {
        "what": what,
        "tokens": length,
        "M": size,
        "N": queries,
        "seconds": float(f"{seconds:.3g}"),
        "tokens/s": round(length / seconds),
        "peak MB": result["peak_memory_mb"],
    }
