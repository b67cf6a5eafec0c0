"""Cost of reading long inputs: time linear and memory constant in the length, beside full attention and unbounded memories.

A Llama with random weights (width 128, 2 layers, 4 heads) reads random tokens in chunks of 128 and of 512, and one of SmolLM2's
shape, with 4 of its 30 layers, in chunks of 512. Queries attend to all entries of a first-in-first-out memory, and to the best
128 of each head where the policy uses attention. The last rows measure a query memory, which is flushed in one step or drained
in chunks of padding, over M and N.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from benchmarks.measure import Claim, Measured, alternately
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.kv.eviction.base import EvictionPolicy
from trime.kv.eviction.fifo import FIFO
from trime.kv.eviction.initial import BelowMean
from trime.kv.eviction.lfa import LFA
from trime.kv.eviction.lra_sum import LRASum
from trime.kv.eviction.score_transform import Raw
from trime.kv.reader import LongReader
from trime.kv.rope import RopeDecoder
from trime.models.pretrained.small import Small

WORDS, WIDTH, LAYERS, HEADS, LONGEST = 1000, 128, 2, 4, 512
CHUNKS, TOP_K, SIZE = (128, 512), 128, 2048
SMOLLM2_LAYERS, SMOLLM2_POSITIONS = 4, 8192
SMALL, WIDE = "width 128", "SmolLM2's shape"
UNBOUNDED, FULL = "everything kept", "full attention"
LEAST = "attention alone, by PyTorch"
Read = Callable[[torch.Tensor], Any]


class Shape(NamedTuple):
    """A model, the lengths of its inputs, the chunks in which it reads them, and the longest input for unbounded memories."""

    title: str
    model: Any
    lengths: list[int]
    chunks: tuple[int, ...]
    whole: int


def decoder(device: str) -> Any:
    """Return a small Llama with random weights."""
    torch.manual_seed(0)
    return Small("decoder", WIDTH, LAYERS, HEADS, LONGEST).build(WORDS, 1, 0).eval().to(device)


def decoder_like_smollm2(device: str, layers: int = SMOLLM2_LAYERS, vocabulary: int = WORDS) -> Any:
    """Return a Llama with random weights, of SmolLM2-135M's shape but for its layers and symbols."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=layers,
        max_position_embeddings=SMOLLM2_POSITIONS,
    )
    return LlamaForCausalLM(config).eval().to(device)


def policies() -> dict[str, EvictionPolicy]:
    """Return the eviction policies that are measured."""
    return {"fifo": FIFO(), "lra_sum": LRASum(BelowMean(2.0), Raw()), "lfa": LFA(BelowMean(2.0), Raw())}


def read_with_memory(model: Any, memory: Attendre, chunk: int, end: str, tokens: torch.Tensor) -> None:
    """Read an input in chunks, with such a memory in every layer."""
    family = RopeDecoder(model)
    reader = LongReader(family, [memory] * len(family.layers), chunk)
    position = torch.arange(tokens.shape[1], device=tokens.device)[None]
    for _ in reader.feed(tokens, position):
        pass
    for _ in reader.end(end):
        pass


@torch.no_grad()
def attend_in_chunks(model: Any, chunk: int, tokens: torch.Tensor) -> None:
    """Attend to as many entries as a memory and a chunk have, for each chunk and layer of an input: the least cost."""
    config = model.config
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    query, key, value = (
        torch.randn(1, heads, length, width, device=tokens.device) for length in (chunk, SIZE + chunk, SIZE + chunk)
    )
    for _ in range(config.num_hidden_layers * tokens.shape[1] // chunk):
        F.scaled_dot_product_attention(query, key, value)


@torch.no_grad()
def read_with_full_attention(model: Any, tokens: torch.Tensor) -> None:
    """Read an input at once, with the model's own code."""
    model.model(tokens, use_cache=False)


def readers(model: Any, length: int, chunk: int) -> dict[str, Read]:
    """Return every way to read an input of this length; full attention has no chunks."""
    memories = {
        name: Attendre(BoundedMemory(SIZE, policy), 0, TOP_K if policy.uses_attention else None, True)
        for name, policy in policies().items()
    }
    memories[UNBOUNDED] = Attendre(BoundedMemory(length, FIFO()), 0, None, True)
    bounded: dict[str, Read] = {
        name: partial(read_with_memory, model, memory, chunk, "flush") for name, memory in memories.items()
    }
    return bounded | {FULL: partial(read_with_full_attention, model), LEAST: partial(attend_in_chunks, model, chunk)}


def measure_alone(step: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Measure a step by itself, so that the peak of memory is that of the step."""
    gc.collect()
    return alternately({"step": step}, rounds, warmup=0)["step"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 65536], help="lengths of the input, in tokens"
    )
    parser.add_argument("--wide", type=int, nargs="*", default=[8192, 16384], help="the same for the model of SmolLM2's shape")
    parser.add_argument("--whole", type=int, default=16384, help="longest input for unbounded memories")
    parser.add_argument("--queries", type=int, nargs="+", default=[128, 512, 1024], help="values of N; M is twice as large")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Measured:
    """Measure every way to read inputs of every length, then the query memory."""
    tokens = torch.randint(2, WORDS, (1, max(*options.lengths, *options.wide)), device=options.device)
    small = decoder(options.device)
    rows = rows_of(Shape(SMALL, small, options.lengths, CHUNKS, options.whole), tokens, options.rounds)
    if options.wide:
        wide = decoder_like_smollm2(options.device)
        rows += rows_of(Shape(WIDE, wide, options.wide, CHUNKS[-1:], 0), tokens, options.rounds)
    length, chunk = min(options.lengths), CHUNKS[0]
    for queries in options.queries:
        for end in ("flush", "drain"):
            memory = Attendre(BoundedMemory(2 * queries, FIFO()), queries, TOP_K)
            result = measure_alone(partial(read_with_memory, small, memory, chunk, end, tokens[:, :length]), options.rounds)
            rows.append(row(SMALL, f"both ways, {end}", length, chunk, 2 * queries, queries, result))
    return Measured(rows, claims(rows))


def rows_of(shape: Shape, tokens: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    """Measure every way in which a model reads inputs."""
    title, model, lengths, chunks, whole = shape
    rows = []
    for name in policies():  # these take least space, so that they come first; lengths and chunks take turns
        reads = {
            (length, chunk): partial(readers(model, length, chunk)[name], tokens[:, :length])
            for length in lengths
            for chunk in chunks
        }
        for (length, chunk), result in alternately(reads, rounds, warmup=0).items():
            rows.append(row(title, f"read, {name}", length, chunk, SIZE, "", result))
    for length in lengths:
        ways = [(UNBOUNDED, chunks[0])] * (length <= whole) + [(FULL, chunks[0]), *((LEAST, chunk) for chunk in chunks)]
        for name, chunk in ways:
            read = partial(readers(model, length, chunk)[name], tokens[:, :length])
            result = measure_alone(read, 1 if name == UNBOUNDED else rounds)
            rows.append(row(title, f"read, {name}", length, "" if name == FULL else chunk, length, "", result))
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims, of chunks of 512: linear time and constant space once a memory is full; ratios to full attention."""
    chunk = CHUNKS[-1]
    read = [row for row in rows if row["chunk"] in (chunk, "")]
    seconds = {(row["model"], row["what"].removeprefix("read, "), row["tokens"]): row["seconds"] for row in read}
    bounds = [("fifo", 8192, 1.0), *((name, 16384, 1.0) for name in policies()), *((name, 65536, 1 / 3) for name in policies())]
    by_policy = [
        [row for row in read if (row["model"], row["what"]) == (SMALL, f"read, {name}") and row["tokens"] >= 8 * SIZE]
        or [row for row in read if (row["model"], row["what"]) == (SMALL, f"read, {name}")]
        for name in policies()
    ]
    ends = [[choose(rows, key=lambda row: row["tokens"]) for choose in (min, max)] for rows in by_policy]
    longest = {model: max(tokens for title, _, tokens in seconds if title == model) for model, _, _ in seconds}
    return [
        Claim("seconds a token, longest input over shortest", max(a["tokens/s"] / b["tokens/s"] for a, b in ends), 1.1),
        Claim("peak memory, longest input over shortest", max(b["peak MB"] / a["peak MB"] for a, b in ends), 1.1),
        *(
            Claim(
                f"{model}: seconds, {name} over full attention, {tokens:,} tokens",
                seconds[model, name, tokens] / seconds[model, FULL, tokens],
                bound,
            )
            for model in longest
            for name, tokens, bound in bounds
            if (model, name, tokens) in seconds
        ),
        *(
            Claim(f"{model}: seconds, fifo over attention alone", seconds[model, "fifo", n] / seconds[model, LEAST, n], 2.0)
            for model, n in longest.items()
        ),
    ]


def row(
    model: str, what: str, length: int, chunk: int | str, size: int, queries: int | str, result: dict[str, float]
) -> dict[str, Any]:
    """Return a row of the results."""
    seconds = result["median_seconds"]
    return {
        "model": model,
        "what": what,
        "tokens": length,
        "chunk": chunk,
        "M": size,
        "N": queries,
        "seconds": float(f"{seconds:.3g}"),
        "tokens/s": round(length / seconds),
        "peak MB": result["peak_memory_mb"],
    }
