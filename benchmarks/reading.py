"""How long a prompt takes to read with an evicting cache, with and without recall, beside transformers' own cache.

A Llama with random weights of SmolLM2-135M's shape, with fewer layers, reads random tokens in one call in bfloat16.
``--beside`` lets other processes compute meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

import trime
from benchmarks.attendre import decoder_like_smollm2
from benchmarks.measure import Claim, Measured, alternately, ratio

PLAIN, RECALL = "transformers' own cache", ", recall"
BOUNDS = {False: 1.1, True: 1.5}  # of the own cache's time, without recall and with it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--size", type=int, default=512, help="M, entries of a memory")
    parser.add_argument("--recall", type=int, default=512, help="entries that queries get back")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4000, 16_000], help="tokens of the prompt")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--beside", type=int, default=0, help="other processes that compute all the time")
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Measured:
    """Read prompts of each length on each number of threads, the caches in turns."""
    model = decoder_like_smollm2(options.device, options.layers).to(torch.bfloat16)
    others = [multiprocessing.Process(target=compute, daemon=True) for _ in range(options.beside)]
    for other in others:
        other.start()
    rows: list[dict[str, Any]] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for length in options.lengths:
            tokens = torch.randint(2, model.config.vocab_size, (1, length), device=options.device)
            turns = {name: partial(read, model, make, tokens) for name, make in caches(model, options).items()}
            results = alternately(turns, options.rounds, warmup=1)
            rows += [
                {
                    "cache": name,
                    "tokens": length,
                    "threads": threads,
                    "ms a token": round(1000 * result["median_seconds"] / length, 3),
                    "times own cache": ratio(result["rounds"], results[PLAIN]["rounds"]),
                }
                for name, result in results.items()
            ]
    for other in others:
        other.terminate()
    claims = []
    for recalls, bound in BOUNDS.items():
        worst = max(
            row["times own cache"] for row in rows if row["cache"] != PLAIN and row["cache"].endswith(RECALL) == recalls
        )
        claims.append(Claim(f"reading {'with' if recalls else 'without'} recall, in times of the own cache", worst, bound))
    return Measured(rows, claims)


def caches(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return what makes each cache, by its name."""
    made: dict[str, Any] = {PLAIN: partial(DynamicCache, config=model.config)}
    for policy in (trime.Sink(4), trime.SnapKV()):
        for end, recall in (("", None), (RECALL, options.recall)):
            cache = partial(trime.EvictingCache, model, options.size, policy, recall=recall)
            made[f"{type(policy).__name__}{end}"] = cache
    return made


@torch.no_grad()
def read(model: Any, make: Any, tokens: torch.Tensor) -> None:
    model(tokens, past_key_values=make(), logits_to_keep=1)


def compute() -> None:
    """Multiply matrices until the process is ended."""
    torch.set_num_threads(1)
    matrix = torch.randn(512, 512)
    while True:
        matrix @ matrix
