"""Cost of an EvictingCache in transformers' generate, beside transformers' own cache.

A Llama with random weights of SmolLM2-135M's shape decodes after a prompt: while the memory still holds everything, and once it
is full, against a plain cache that holds as many entries; and it reads a long prompt at once, with and without a question that
guides what is kept.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

import trime
from benchmarks.attendre import decoder_like_smollm2
from benchmarks.measure import Claim, Measured, alternately, ratio
from trime.kv.eviction.base import EvictionPolicy

UNTIL_FULL, WHEN_FULL, READ, GUIDED = "decode until full", "decode when full", "read a prompt", "read, guided by a question"
BOUNDS = {UNTIL_FULL: 1.1, WHEN_FULL: 1.3}
QUESTION = 20  # tokens


def policies() -> dict[str, EvictionPolicy]:
    """Return the policies that are measured."""
    attention = trime.Softmax()
    return {
        "fifo": trime.FIFO(),
        "sink": trime.Sink(),
        "tova": trime.TOVA(attention),
        "h2o": trime.H2O(attention),
        "snapkv": trime.SnapKV(attention),
    }


@torch.no_grad()
def feed(model: Any, cache: Any, tokens: torch.Tensor, each: int) -> None:
    """Let a model read tokens [1 n], ``each`` at a time."""
    for part in tokens.split(each, 1):
        model(input_ids=part, past_key_values=cache, logits_to_keep=1)


def decode_on(model: Any, cache: Any, tokens: torch.Tensor) -> None:
    """Decode after what a cache holds, which stays as it is: each round begins with the same."""
    feed(model, copy.deepcopy(cache), tokens, 1)


def read_plain(model: Any, prompt: torch.Tensor) -> None:
    """Read a prompt at once with transformers' own cache."""
    feed(model, DynamicCache(config=model.config), prompt, prompt.shape[1])


def read_evicting(model: Any, size: int, policy: EvictionPolicy, prompt: torch.Tensor, question: torch.Tensor | None) -> None:
    """Read a prompt at once into a memory, or chunk by chunk with a question that decides what is kept."""
    cache = trime.EvictingCache(model, size, policy)
    if question is None:
        feed(model, cache, prompt, prompt.shape[1])
    else:
        cache.read(model, prompt, question)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=30, help="layers of the model")
    parser.add_argument("--vocabulary", type=int, default=49_152, help="symbols of the model")
    parser.add_argument("--size", type=int, default=512, help="M, entries of a full memory")
    parser.add_argument("--decode", type=int, default=128, help="tokens decoded in a round")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt that is read")
    parser.add_argument("--policies", nargs="+", default=list(policies()), choices=list(policies()))
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Measured:
    """Measure every policy beside a plain cache."""
    model = decoder_like_smollm2(options.device, options.layers, options.vocabulary)
    tokens = torch.randint(2, options.vocabulary, (1, max(options.prompt, 2 * options.size)), device=options.device)
    rows = []
    for name in options.policies:
        policy, size = policies()[name], options.size
        filled = {
            "plain": (DynamicCache(config=model.config), size),
            UNTIL_FULL: (trime.EvictingCache(model, 4 * size, policy), size),
            WHEN_FULL: (trime.EvictingCache(model, size, policy), 2 * size),
        }
        for cache, length in filled.values():
            feed(model, cache, tokens[:, :length], length)
        decode = {what: partial(decode_on, model, cache, tokens[:, : options.decode]) for what, (cache, _) in filled.items()}
        rows += rows_of(name, alternately(decode, options.rounds, warmup=1), options.decode)

        prompt = tokens[:, : options.prompt]
        read: dict[str, Any] = {"plain": partial(read_plain, model, prompt)}
        for what, question in ((READ, None), (GUIDED, tokens[:, :QUESTION])):
            if question is None or policy.can_be_guided:
                read[what] = partial(read_evicting, model, size, policy, prompt, question)
        rows += rows_of(name, alternately(read, max(1, options.rounds // 2), warmup=0), options.prompt)
    worst = {what: max(row["over plain"] for row in rows if row["what"] == what) for what in BOUNDS}
    return Measured(
        rows, [Claim(f"{what}: time a token over a plain cache", worst[what], bound) for what, bound in BOUNDS.items()]
    )


def rows_of(policy: str, results: dict[str, dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Return a row for each way, with its time over that of the plain cache in the same round."""
    plain = results.pop("plain")
    return [
        {
            "what": what,
            "policy": policy,
            "ms a token": float(f"{1000 * result['median_seconds'] / tokens:.3g}"),
            "plain, ms a token": float(f"{1000 * plain['median_seconds'] / tokens:.3g}"),
            "over plain": ratio(result["rounds"], plain["rounds"]),
            "peak MB": result["peak_memory_mb"],
        }
        for what, result in results.items()
    ]
