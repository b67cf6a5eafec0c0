"""TRIME's objective, forward and backward: blockwise, beside the direct formulation and three bare products of its size.

The direct formulation is the published one: the matrix of similarities, a mask, one log-softmax over it and the vocabulary's
mass, a mask of labels. Contexts are from segments of 512 tokens that all see one another (section 4.3), tokens are drawn by
Zipf's law. Peak memory is measured in a separate process, relative to that before the step. The adaptive softmax has 20,000
words in its first band. On CUDA all products are TF32, as in trainings in bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import ROOT, Claim, Measured, alternately, ratio, share
from trime.common.cpu import select_matmul
from trime.common.metrics import process_peak, reset_process_peak
from trime.common.types import Contexts, LogMass, TokenPosition
from trime.layers.embeddings import AdaptiveInput
from trime.layers.heads import AdaptiveSoftmax
from trime.scoring.mixtures.joint import joint_log_prob
from trime.token_memory.train.objective.blockwise import blockwise_mass
from trime.token_memory.train.visibility import External, Local, Long, Visibility

SEGMENT, WORDS, CUTOFFS = 512, 50_000, [20_000]
SIGHTS: dict[str, Visibility] = {"external": External(), "local": Local(), "long": Long()}
CLAIMED = 12288  # number of contexts to which the claims refer; larger ones are timed once
MATRICES = 10  # n x n matrices that must fit into memory for the direct formulation, which holds seven at its peak


class Implementations:
    """Random contexts of one n and d, and every implementation of the objective's gradient with respect to g."""

    def __init__(self, n: int, d: int, device: str):
        torch.manual_seed(0)
        self.g = F.layer_norm(torch.randn(n, d, device=device), (d,)).requires_grad_()
        token = torch.from_numpy(np.minimum(np.random.default_rng(0).zipf(1.3, n), WORDS - 1)).to(device)
        order = torch.arange(n, device=device)
        self.contexts = Contexts(self.g, token, TokenPosition(order // (6 * SEGMENT), order // SEGMENT, order))
        self.vocabulary = LogMass(torch.zeros(n, device=device), torch.full((n,), 8.0, device=device))
        self.others = torch.full((n,), math.log(math.expm1(8.0)), device=device)  # the vocabulary's mass without the target's
        self.divisor = torch.tensor([math.sqrt(d)], device=device)

    def blockwise(self, sight: str = "external") -> Tensor:
        """Return the gradient by this project's implementation."""
        mass = blockwise_mass(self.contexts, self.contexts, SIGHTS[sight], self.divisor)
        return self.gradient(-joint_log_prob(self.vocabulary, [LogMass(mass.target[0], mass.total[0])]))

    def direct(self, sight: str = "external") -> Tensor:
        """Return the gradient by the published formulation."""
        visible = SIGHTS[sight].sees(self.contexts.positions, self.contexts.positions)
        score = (self.g @ self.g.T / self.divisor).masked_fill(~visible, -math.inf)
        share = torch.cat([self.vocabulary.target[:, None], self.others[:, None], score], 1).log_softmax(1)
        first = torch.tensor([True, False], device=visible.device).expand(len(visible), 2)  # the target's logit, all others'
        hit = torch.cat([first, self.contexts.token[:, None] == self.contexts.token], 1)
        return self.gradient(-share.masked_fill(~hit, -math.inf).logsumexp(1))

    def gradient(self, loss: Tensor) -> Tensor:
        """Return the gradient of a loss with respect to g."""
        return torch.autograd.grad(loss.sum(), self.g)[0]

    @torch.no_grad()
    def bare(self) -> None:
        """Compute the three matrix products of the direct formulation, and nothing else."""
        score = self.g @ self.g.T
        score @ self.g
        score.T @ self.g


class Head:
    """The vocabulary's part: the adaptive softmax blockwise, and with all logits at once."""

    def __init__(self, n: int, d: int, device: str):
        torch.manual_seed(0)
        self.head = AdaptiveSoftmax(AdaptiveInput(WORDS, d, CUTOFFS)).to(device)
        self.f = torch.randn(n, d, device=device, requires_grad=True)
        tokens = np.minimum(np.random.default_rng(0).zipf(1.3, n), WORDS - 1)
        self.token = torch.from_numpy(tokens).to(device)

    def blockwise(self) -> Tensor:
        """Return the gradient by this project's implementation."""
        mass = self.head.mass(self.f, self.token)
        return torch.autograd.grad((mass.total - mass.target).sum(), self.f)[0]

    def direct(self) -> Tensor:
        """Return the gradient by way of all logits."""
        loss = -self.head.log_probs(self.f).gather(1, self.token[:, None]).sum()
        return torch.autograd.grad(loss, self.f)[0]


KINDS: dict[str, Any] = {"objective": Implementations, "head": Head}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=int, nargs="+", default=[4096, 12288, 24576], help="numbers of contexts in a batch")
    parser.add_argument("--d", type=int, nargs="+", default=[512, 1024], help="widths of the model")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Measured:
    """Measure times side by side, and peak memory in separate processes."""
    cells = [(n, d) for d in options.d for n in options.n]
    rows = [row for n, d in cells for row in measure_size(n, d, options.device, options.rounds)]
    n = min(CLAIMED, max(options.n))
    heads = extra_memory("head", n, min(options.d), options.device, ["blockwise", "direct"])
    rows += [{"what": f"adaptive softmax, {way}", "n": n, "d": min(options.d), "extra MB": heads[way]} for way in heads]
    return Measured(rows, claims(rows, n, heads, options.device))


def measure_size(n: int, d: int, device: str, rounds: int) -> list[dict[str, Any]]:
    """Return a row for every implementation at one size."""
    implementations, fits = Implementations(n, d, device), MATRICES * 4 * n * n < free_memory(device)
    ways: dict[str, Callable[[], Any]] = {"blockwise": implementations.blockwise, "three products": implementations.bare}
    ways |= {f"blockwise, {sight}": partial(implementations.blockwise, sight) for sight in ("local", "long")}
    ways |= {"direct": implementations.direct} if fits else {}
    results = alternately(ways, *((rounds, 1) if n <= CLAIMED else (1, 0)))
    names = [name for name in ways if name != "three products"]
    del implementations, ways
    gc.collect()
    reset_process_peak()  # returns freed memory to the system, for the processes that follow
    peaks, rows = extra_memory("objective", n, d, device, names), []
    for name, result in results.items():
        seconds = result["median_seconds"]
        row = {"what": name, "n": n, "d": d, "seconds": round(seconds, 3), "least": result["least_seconds"]}
        others = [other for other in ("direct", "three products") if other in results]
        row |= {f"over {other}": ratio(result["rounds"], results[other]["rounds"]) for other in others}
        rows.append(row | ({"extra MB": peaks[name]} if name in peaks else {}))
    return rows


def claims(rows: list[dict[str, Any]], n: int, heads: dict[str, float], device: str) -> list[Claim]:
    """Return the claims for n contexts, for the worst d."""
    ours = {(row["n"], row["d"]): row for row in rows if row["what"] == "blockwise"}
    theirs = {(row["n"], row["d"]): row for row in rows if row["what"] == "direct"}
    at = [key for key in ours if key[0] == n and key in theirs]
    products, direct = (worst(ours[key][f"over {other}"] for key in at) for other in ("three products", "direct"))
    memory = worst(share(ours[key]["extra MB"], theirs[key]["extra MB"]) for key in at)
    growth = worst(share(ours[2 * n, d]["extra MB"], ours[n, d]["extra MB"]) for _, d in at if (2 * n, d) in ours)
    cuda = device != "cpu"
    return [
        Claim(f"extra memory over direct at n={n}", memory, 0.1),
        Claim(f"extra memory at n={2 * n} over that at n={n}", growth, 2.2),
        Claim(f"CPU time over direct at n={n}", None if cuda else direct, 0.4),
        Claim(f"CPU time over three bare products at n={n}", None if cuda else products, 0.9),
        Claim(f"CUDA time over direct at n={n}", direct if cuda else None, 0.25),
        Claim(f"CUDA time over three bare products at n={n}", products if cuda else None, 2.0),
        Claim("extra memory of the adaptive softmax over its logits at once", share(heads["blockwise"], heads["direct"]), 0.1),
    ]


def worst(values: Iterable[float | None]) -> float | None:
    """Return the largest value that is not None; None if there is none."""
    return max((value for value in values if value is not None), default=None)


def free_memory(device: str) -> int:
    """Return the free bytes of a device."""
    if device != "cpu":
        return torch.cuda.mem_get_info()[0]
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def extra_memory(kind: str, n: int, d: int, device: str, ways: list[str]) -> dict[str, float]:
    """Return the MB that each implementation takes at its peak in a process of its own, beyond those before."""
    script = f"from benchmarks.objective import peaks; print(peaks{(kind, n, d, device, ways)})"
    early_return = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc returns memory to the system as soon as it is freed
    command, environment = [sys.executable, "-c", script], os.environ | early_return
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return dict(zip(ways, json.loads(done.stdout.splitlines()[-1]), strict=True))


def peaks(kind: str, n: int, d: int, device: str, ways: list[str]) -> list[float]:
    """Return the peak MB of each implementation beyond those before, after a small warm-up for the libraries' own memory."""
    select_matmul()
    small, large, extra = KINDS[kind](1024, d, device), KINDS[kind](n, d, device), []
    for way in ways:
        name, *sight = way.split(", ")
        getattr(small, name)(*sight)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            getattr(large, name)(*sight)
            extra.append((torch.cuda.max_memory_allocated() - before) / 2**20)
            continue
        reset_process_peak()
        before = process_peak()
        getattr(large, name)(*sight)
        extra.append((process_peak() - before) / 2**20)
    return [round(megabytes, 1) for megabytes in extra]
