"""TRIME's objective, forward and backward: by tiles, beside the direct formulation and three bare products of its size.

Direct, as published: the matrix of similarities, a mask, one log-softmax over it and the vocabulary's mass, a mask of labels.
Contexts are of segments of 512 tokens that all see one another (section 4.3), tokens are drawn by Zipf's law. Peak memory is
that of a process of its own, less what it had before. The adaptive softmax has 20,000 words in its first band.
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
from trime.kernels.cpu import select_matmul
from trime.memory.objective.blockwise import blockwise_mass
from trime.memory.visibility import External, Local, Long, Visibility
from trime.metrics import process_peak, reset_process_peak
from trime.mixtures.joint import joint
from trime.models.layers.embeddings import AdaptiveInput
from trime.models.layers.heads import AdaptiveSoftmax
from trime.types import Contexts, Mass, TokenPosition

SEGMENT, WORDS, CUTOFFS = 512, 50_000, [20_000]
SIGHTS: dict[str, Visibility] = {"external": External(), "local": Local(), "long": Long()}
CLAIMED = 12288  # contexts of which the claims speak; more are timed once
MATRICES = 10  # of n x n numbers that the direct way may take, which holds seven at its peak


class Contest:
    """One n and d: contexts, and every way to differentiate the objective with regard to g."""

    def __init__(self, n: int, d: int, device: str):
        torch.manual_seed(0)
        self.g = F.layer_norm(torch.randn(n, d, device=device), (d,)).requires_grad_()
        token = torch.from_numpy(np.minimum(np.random.default_rng(0).zipf(1.3, n), WORDS - 1)).to(device)
        order = torch.arange(n, device=device)
        self.contexts = Contexts(self.g, token, TokenPosition(order // (6 * SEGMENT), order // SEGMENT, order))
        self.vocabulary = Mass(torch.zeros(n, device=device), torch.full((n,), 8.0, device=device))
        self.others = torch.full((n,), math.log(math.expm1(8.0)), device=device)  # the vocabulary's mass without the target's
        self.divisor = torch.tensor([math.sqrt(d)], device=device)

    def blockwise(self, sight: str = "external") -> Tensor:
        """The way of this project; the gradient."""
        found = blockwise_mass(self.contexts, self.contexts, SIGHTS[sight], self.divisor)
        return self.gradient(-joint(self.vocabulary, [Mass(found.target[0], found.total[0])]))

    def direct(self, sight: str = "external") -> Tensor:
        """The published way; the gradient."""
        seen = SIGHTS[sight].sees(self.contexts.place, self.contexts.place)
        score = (self.g @ self.g.T / self.divisor).masked_fill(~seen, -math.inf)
        share = torch.cat([self.vocabulary.target[:, None], self.others[:, None], score], 1).log_softmax(1)
        first = torch.tensor([True, False], device=seen.device).expand(len(seen), 2)  # the target's logit, all others'
        hit = torch.cat([first, self.contexts.token[:, None] == self.contexts.token], 1)
        return self.gradient(-share.masked_fill(~hit, -math.inf).logsumexp(1))

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss.sum(), self.g)[0]

    @torch.no_grad()
    def bare(self) -> None:
        """The three products of the direct way, and nothing else."""
        score = self.g @ self.g.T
        score @ self.g
        score.T @ self.g


class Head:
    """The vocabulary's part: the adaptive softmax by blocks, and with its logits at once."""

    def __init__(self, n: int, d: int, device: str):
        torch.manual_seed(0)
        self.head = AdaptiveSoftmax(AdaptiveInput(WORDS, d, CUTOFFS)).to(device)
        self.f = torch.randn(n, d, device=device, requires_grad=True)
        drawn = np.minimum(np.random.default_rng(0).zipf(1.3, n), WORDS - 1)
        self.token = torch.from_numpy(drawn).to(device)

    def blockwise(self) -> Tensor:
        mass = self.head.evidence(self.f, self.token)
        return torch.autograd.grad((mass.total - mass.target).sum(), self.f)[0]

    def direct(self) -> Tensor:
        loss = -self.head.log_probs(self.f).gather(1, self.token[:, None]).sum()
        return torch.autograd.grad(loss, self.f)[0]


KINDS: dict[str, Any] = {"contest": Contest, "head": Head}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=int, nargs="+", default=[4096, 12288, 24576], help="contexts of a batch")
    parser.add_argument("--d", type=int, nargs="+", default=[512, 1024], help="width")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Measured:
    """Times side by side, memory alone."""
    cells = [(n, d) for d in options.d for n in options.n]
    rows = [row for n, d in cells for row in of_cell(n, d, options.device, options.rounds)]
    n = min(CLAIMED, max(options.n))
    heads = extra("head", n, min(options.d), options.device, ["blockwise", "direct"])
    rows += [{"what": f"adaptive softmax, {way}", "n": n, "d": min(options.d), "extra MB": heads[way]} for way in heads]
    return Measured(rows, claims(rows, n, heads, options.device))


def of_cell(n: int, d: int, device: str, rounds: int) -> list[dict[str, Any]]:
    """Every way at one size."""
    contest, fits = Contest(n, d, device), MATRICES * 4 * n * n < memory(device)
    ways: dict[str, Callable[[], Any]] = {"blockwise": contest.blockwise, "three products": contest.bare}
    ways |= {f"blockwise, {sight}": partial(contest.blockwise, sight) for sight in ("local", "long")}
    ways |= {"direct": contest.direct} if fits else {}
    found = alternately(ways, *((rounds, 1) if n <= CLAIMED else (1, 0)))
    asked = [name for name in ways if name != "three products"]
    del contest, ways
    gc.collect()
    reset_process_peak()  # gives back what is kept, for the processes that follow
    peaks, rows = extra("contest", n, d, device, asked), []
    for name, own in found.items():
        seconds = own["median_seconds"]
        row = {"what": name, "n": n, "d": d, "seconds": round(seconds, 3), "least": own["least_seconds"]}
        others = [other for other in ("direct", "three products") if other in found]
        row |= {f"over {other}": ratio(own["rounds"], found[other]["rounds"]) for other in others}
        rows.append(row | ({"extra MB": peaks[name]} if name in peaks else {}))
    return rows


def claims(rows: list[dict[str, Any]], n: int, heads: dict[str, float], device: str) -> list[Claim]:
    """What is said of the figures at n, the worst over d."""
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


def worst(found: Iterable[float | None]) -> float | None:
    """The largest of what there is."""
    return max((one for one in found if one is not None), default=None)


def memory(device: str) -> int:
    """Bytes of the device that are free."""
    if device != "cpu":
        return torch.cuda.mem_get_info()[0]
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(told["MemAvailable"].split()[0]) * 1024


def extra(kind: str, n: int, d: int, device: str, ways: list[str]) -> dict[str, float]:
    """MB that each way takes at its peak beyond what was there, in a process that does nothing else."""
    asked = f"from benchmarks.objective import peaks; print(peaks{(kind, n, d, device, ways)})"
    given_back = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # by glibc, as soon as it is freed
    command, environment = [sys.executable, "-c", asked], os.environ | given_back
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return dict(zip(ways, json.loads(run.stdout.splitlines()[-1]), strict=True))


def peaks(kind: str, n: int, d: int, device: str, ways: list[str]) -> list[float]:
    """MB at the peak less those before, once libraries have taken their working memory; what is freed is given back."""
    select_matmul()
    small, contest, found = KINDS[kind](1024, d, device), KINDS[kind](n, d, device), []
    for way in ways:
        name, *sight = way.split(", ")
        getattr(small, name)(*sight)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            getattr(contest, name)(*sight)
            found.append((torch.cuda.max_memory_allocated() - before) / 2**20)
            continue
        reset_process_peak()
        before = process_peak()
        getattr(contest, name)(*sight)
        found.append((process_peak() - before) / 2**20)
    return [round(own, 1) for own in found]
