"""What recall costs as the store of evicted entries grows: a token that is written, and a prompt that is read.

A Llama with random weights of SmolLM2-135M's shape has read a text of each length, whose entries are random, and goes on with
recall, without it, and (where it writes) with everything kept. The order of these is shuffled in each round.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

import trime
from benchmarks.attendre import decoder_like_smollm2
from benchmarks.cache import feed
from benchmarks.measure import Claim, Measured, alternately, ratio

EVICTED, RECALLED, KEPT = "evicted", "recalled", "everything kept"
WAYS = {"write": 1, "read": 10**6}  # tokens at a time
BOUND = 1.3  # of the longest text, in times of the shortest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=30, help="layers of the model")
    parser.add_argument("--vocabulary", type=int, default=49_152, help="symbols of the model")
    parser.add_argument("--size", type=int, default=512, help="M, entries of a memory")
    parser.add_argument("--recall", type=int, default=512, help="entries that queries get back")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32768, 131_072], help="tokens of the text")
    parser.add_argument("--write", type=int, default=16, help="tokens written in a round")
    parser.add_argument("--read", type=int, default=256, help="tokens of the prompt read in a round")
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Measured:
    """Measure each length beside a memory without recall, and for writing beside one that keeps everything."""
    model = decoder_like_smollm2(options.device, options.layers, options.vocabulary).to(torch.bfloat16)
    room = (options.rounds + 1) * options.write
    caches = {EVICTED: after(model, options.size, options.size * 2, None)}
    for length in options.lengths:
        caches[f"{RECALLED}, {length}"] = after(model, options.size, length, options.recall)
        caches[f"{KEPT}, {length}"] = keeping(model, length, room)
    held = {name: (cache.bytes / 1e6, cache.stored_bytes / 1e6) for name, cache in caches.items()}
    rows, claims = [], []
    for way, each in WAYS.items():
        count = getattr(options, way)
        tokens = torch.randint(2, options.vocabulary, (1, count), device=options.device)
        compared = {name: cache for name, cache in caches.items() if way == "write" or not name.startswith(KEPT)}  # too slow
        turns = {name: partial(feed, model, cache, tokens, each) for name, cache in compared.items()}
        results = alternately(turns, options.rounds, warmup=1)
        for name, result in results.items():
            memory, _, before = name.partition(", ")
            row: dict[str, Any] = {"what": way, "memory": memory, "tokens before": before or "any"}
            row |= {"ms a token": round(1000 * result["median_seconds"] / count, 3)}
            row |= {"times without recall": ratio(result["rounds"], results[EVICTED]["rounds"])}
            row |= {"held on the device, MB": round(held[name][0], 1), "stored, MB": round(held[name][1])}
            rows.append(row)
        longest, shortest = (results[f"{RECALLED}, {chosen(options.lengths)}"]["rounds"] for chosen in (max, min))
        claims.append(
            Claim(f"{way}: a token after the longest text, in times of the shortest", ratio(longest, shortest), BOUND)
        )
    return Measured(rows, claims)


@torch.no_grad()
def after(model: Any, size: int, length: int, recall: int | None) -> trime.EvictingCache:
    """Return a full memory whose store has random entries at the positions of a text that was not read."""
    cache = trime.EvictingCache(model, size, trime.Sink(4), recall=recall)
    begun = 2 * size
    feed(model, cache, torch.randint(2, model.config.vocab_size, (1, begun), device=model.device), begun)
    for layer in cache.with_separate_rankings():
        if layer.store is not None:
            shape = (1, length - begun, *layer.columns[0].shape[2:])
            key, value = (torch.randn(shape, dtype=model.dtype) for _ in range(2))
            layer.store.write(key, value, torch.arange(begun, length)[None])
    cache.seen = length
    return cache


@torch.no_grad()
def keeping(model: Any, length: int, room: int) -> trime.EvictingCache:
    """Return a memory with room for more, which holds all entries of a text that was not read; they are random."""
    cache, config = trime.EvictingCache(model, length + room, trime.FIFO()), model.config
    for layer in cache.with_separate_rankings():
        assert layer.filling is not None
        shape = (1, length, config.num_key_value_heads, config.hidden_size // config.num_attention_heads)
        key, value = (torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        layer.filling.append(key, key, value, torch.arange(length, device=model.device)[None])
    cache.seen = length
    return cache
