"""TRIME's training step beside that of the plain language model, at the shape of the WikiText-103 model of 247M parameters.

A step is 16 times one layer, plus the head; TRIME's step adds its objective. Each part is measured by itself, forward and
backward, with the dropout of training. Rows of 3,072 tokens go through the layer one by one, so a batch costs as many times one
row. The embedding and the optimizer, which both steps share, are left out, which makes the ratio larger. On CUDA the model
computes in bfloat16 and the objective's products are TF32, as in training.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from benchmarks.measure import Claim, Measured, alternately, ratio
from benchmarks.objective import Implementations
from trime.config.compose import compose_config
from trime.models.network import build_network

WORDS = 267_744  # WikiText-103's vocabulary
SIGHTS = {"trime": "local", "trime_long": "long", "trime_ext": "external"}
BOUND = 1.1


class Step:
    """The parts of a plain step, each with forward and backward pass."""

    def __init__(self, model: DictConfig, tokens: int, device: str):
        torch.manual_seed(0)
        self.autocast = torch.autocast("cuda", torch.bfloat16, enabled=device != "cpu")
        self.network = build_network(model, WORDS).to(device)
        length = min(tokens, model.backbone.positions)
        self.rows = tokens / length
        self.layer_ = self.network.backbone.layers[0]
        self.row = torch.randn(1, length, model.width, device=device, requires_grad=True)
        self.f = torch.randn(tokens, model.width, device=device, requires_grad=True)
        frequency = 1 / torch.arange(1, WORDS + 1, device=device, dtype=torch.float64)
        self.token = torch.multinomial(frequency, tokens, replacement=True)

    def layer(self) -> None:
        """Run one layer over one row."""
        with self.autocast:
            loss = self.layer_(self.row, None)[0].sum()
        loss.backward()

    def head(self) -> None:
        """Compute the loss over the vocabulary."""
        with self.autocast:
            mass = self.network.vocabulary_mass(self.f, self.token)
        (mass.total - mass.target).sum().backward()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="wt103_247m", help="a file of conf/model")
    parser.add_argument("--tokens", type=int, default=24576, help="tokens of a batch")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Measured:
    """Measure every part in turns, and sum up the steps."""
    model = compose_config("experiment=trime", f"model={options.model}", "head=adaptive").model
    layers, model.backbone.layers = model.backbone.layers, 1
    step, objective = Step(model, options.tokens, options.device), Implementations(options.tokens, model.width, options.device)
    parts: dict[str, Any] = {"layer": step.layer, "head": step.head}
    parts |= {name: partial(objective.blockwise, sight) for name, sight in SIGHTS.items()}
    results = alternately(parts, options.rounds, warmup=1)
    times = layers * step.rows
    plain = [times * layer + head for layer, head in zip(results["layer"]["rounds"], results["head"]["rounds"], strict=True)]
    rows = [
        {"what": f"{name}, one row" if name == "layer" else f"{name}, objective" if name in SIGHTS else name}
        | {"seconds": round(result["median_seconds"], 3), "peak_memory_mb": result["peak_memory_mb"]}
        for name, result in results.items()
    ]
    rows.append({"what": f"plain step, {options.tokens:,} tokens", "seconds": round(sorted(plain)[len(plain) // 2], 2)})
    over = {}
    for sight in SIGHTS:
        steps = [base + objective_seconds for base, objective_seconds in zip(plain, results[sight]["rounds"], strict=True)]
        over[sight] = ratio(steps, plain)
        rows.append({"what": f"{sight} step", "seconds": round(sorted(steps)[len(steps) // 2], 2), "over plain": over[sight]})
    return Measured(rows, [Claim(f"step of {sight} over the plain one's", value, BOUND) for sight, value in over.items()])
