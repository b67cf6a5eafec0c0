"""What a token costs that a run's model writes, with its memories and mixture, beside a cached token of the model alone.

Each run continues the same prompt greedily. The model alone reads one token with the keys and values of as many as a window
holds, and chooses the most likely one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import trime
from benchmarks.measure import Claim, Measured, alternately

BOUND = 1.3  # of a written token over one of the model alone
PROMPT, WRITTEN = 700, 10  # tokens, the second in each turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--prompt", type=Path, required=True, help="a file that is continued")
    parser.add_argument("--rounds", type=int, default=20)


def measure(options: argparse.Namespace) -> Measured:
    """Return a row for each run."""
    rows = []
    for folder in options.runs:
        model = trime.load(folder)
        writer = model.start(max_new_tokens=10**6, temperature=0.0)
        tokens = writer.token_ids(options.prompt.read_text(encoding="utf-8"))[:PROMPT]
        writer.continuation.read(tokens)
        turns: dict[str, Callable[[], Any]] = {
            "alone": partial(several, Alone(writer.continuation.network, tokens)),
            "written": partial(several, partial(next, writer.steps())),
        }
        measured = alternately(turns, options.rounds)
        ms = {name: 1000 * each["median_seconds"] / WRITTEN for name, each in measured.items()}
        rows.append(
            {"run": model.graph.config.name, "row": model.label, "parameters": writer.continuation.network.parameter_count}
            | {f"ms {name}": round(value, 2) for name, value in ms.items()}
            | {"over alone": round(ms["written"] / ms["alone"], 2)}
        )
    claims = [
        Claim(f"a token of {row['run']} ({row['parameters']:,} parameters) over one of its model", row["over alone"], BOUND)
        for row in rows
    ]
    return Measured(rows, claims)


def several(step: Callable[[], Any]) -> None:
    """Take some steps."""
    for _ in range(WRITTEN):
        step()


class Alone:
    """A model that chooses the next token again and again; its window has half to all of the tokens that fit."""

    def __init__(self, network: Any, tokens: list[int]):
        self.network, self.tokens = network, tokens
        self.half = min(len(tokens), network.backbone.positions) // 2
        self.read, self.kept = 2 * self.half, None

    def __call__(self) -> int:
        if self.read >= 2 * self.half:  # the window has no room for more
            self.kept, self.read = self.network.backbone.new_cache(), self.half
            self.step(0, self.half)
        self.read += 1
        return self.step(self.read - 1, self.read)

    @torch.no_grad()
    def step(self, first: int, last: int) -> int:
        tokens = torch.tensor([self.tokens[first:last]], device=next(self.network.parameters()).device)
        encoding, _ = self.network(tokens, None, None, self.kept)
        return int(self.network.head.log_probs(encoding.f[0, -1:]).argmax())
