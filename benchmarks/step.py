"""TRIME's training step beside the plain language model's, at the shape of the WikiText-103 model of 247M parameters.

A step is 16 times one layer, and the head; TRIME's has the objective besides. Each part is measured by itself, forward and
backward, with the dropout it has in training. Rows of 3,072 tokens go through the layer one by one, so a batch is as many
times one row. What both steps share beside that (embedding, optimizer) is left out, which makes the ratio larger.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch import Tensor

from benchmarks.measure import Claim, Measured, alternately, ratio
from trime.memory.blockwise import blockwise_mass
from trime.memory.visibility import External, Local, Long, Visibility
from trime.mixtures.joint import joint
from trime.models.network import build_network
from trime.types import Contexts, Mass, Place

CONF = Path(__file__).parents[1] / "conf"
WORDS, SEGMENT = 267_744, 512  # WikiText-103's vocabulary; contexts of a segment of TRIME's 512 (section 4.3)
SIGHTS: dict[str, Visibility] = {"trime": Local(), "trime_long": Long(), "trime_ext": External()}
BOUND = 1.1


class Step:
    """The parts of a step; each returns when its gradients are there."""

    def __init__(self, model: DictConfig, tokens: int, device: str):
        torch.manual_seed(0)
        self.network = build_network(model, WORDS).to(device)
        length = min(tokens, model.backbone.positions)
        self.rows = tokens / length
        self.layer_ = self.network.backbone.layers[0]  # type: ignore[index, union-attr]
        self.row = torch.randn(1, length, model.width, device=device, requires_grad=True)
        self.f = torch.randn(tokens, model.width, device=device, requires_grad=True)
        frequency = 1 / torch.arange(1, WORDS + 1, device=device, dtype=torch.float64)
        self.token = torch.multinomial(frequency, tokens, replacement=True)
        order = torch.arange(tokens, device=device)
        place = Place(order // (6 * SEGMENT), order // SEGMENT, order)
        self.g = torch.nn.functional.layer_norm(torch.randn_like(self.f), (model.width,)).detach().requires_grad_()
        self.contexts = Contexts(self.g, self.token, place)
        with torch.no_grad():
            self.mass = self.network.vocabulary_mass(self.f, self.token)

    def layer(self) -> None:
        """One layer over one row."""
        self.layer_(self.row, None)[0].sum().backward()  # type: ignore[operator]

    def head(self) -> None:
        """The vocabulary's loss."""
        mass = self.network.vocabulary_mass(self.f, self.token)
        (mass.total - mass.target).sum().backward()

    def objective(self, sight: str) -> Tensor:
        """What Eq. 5 adds: the memory's mass, joined with the vocabulary's."""
        divisor = self.g.new_tensor([math.sqrt(self.g.shape[1])])
        found = blockwise_mass(self.contexts, self.contexts, SIGHTS[sight], divisor)
        loss = -joint(self.mass, [Mass(found.target[0], found.total[0])]).sum()
        return torch.autograd.grad(loss, self.g)[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="wt103_247m", help="a file of conf/model")
    parser.add_argument("--tokens", type=int, default=24576, help="of a batch")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Measured:
    """Every part in turn, and what a step comes to."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        model = compose("config", ["experiment=trime", f"model={options.model}", "head=adaptive"]).model
    layers, model.backbone.layers = model.backbone.layers, 1
    step = Step(model, options.tokens, options.device)
    ways: dict[str, Any] = {"layer": step.layer, "head": step.head}
    ways |= {sight: lambda sight=sight: step.objective(sight) for sight in SIGHTS}
    found = alternately(ways, options.rounds, warmup=1)
    times = layers * step.rows
    plain = [times * layer + head for layer, head in zip(found["layer"]["rounds"], found["head"]["rounds"], strict=True)]
    rows = [
        {"what": f"{name}, one row" if name == "layer" else f"{name}, objective" if name in SIGHTS else name}
        | {"seconds": round(own["median_seconds"], 3), "peak_memory_mb": own["peak_memory_mb"]}
        for name, own in found.items()
    ]
    rows.append({"what": f"plain step, {options.tokens:,} tokens", "seconds": round(sorted(plain)[len(plain) // 2], 2)})
    over = {}
    for sight in SIGHTS:
        whole = [base + more for base, more in zip(plain, found[sight]["rounds"], strict=True)]
        over[sight] = ratio(whole, plain)
        rows.append({"what": f"{sight} step", "seconds": round(sorted(whole)[len(whole) // 2], 2), "over plain": over[sight]})
    return Measured(rows, [Claim(f"step of {sight} over the plain one's", value, BOUND) for sight, value in over.items()])
