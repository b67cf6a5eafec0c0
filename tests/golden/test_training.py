"""The short runs of the published trainer, from its first checkpoint to its last (model/NAME/train_trajectory.json).

Ours use the LightningModule with its accumulation, clipping and schedules, over batches planned in the published
order.

The published runs are in float32, and the rounding of one update is amplified by the next ones: by how much depends on
the model, the text and the learning rates, and the rounding itself on the machine and its threads. The tolerance is
therefore estimated from the run itself. Our run in float64 is taken as exact, since its rounding is 10^9 times finer.
Three of our runs in float32, two of them from weights perturbed by one rounding, show how far float32 deviates from it.
The published run may deviate TIMES as far as the farthest of them, and by the rounding of the number itself. (If
deviations were normal, one in a thousand would be larger than ten times the largest of three others.)
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import pytorch_lightning as pl
import torch

from tests.golden.checkpoints import corpus_of, models, network
from tests.golden.commands import CRITERIA, option, schedule
from tests.golden.published import ROOT, index, parametrized
from tests.golden.texts import stream
from trime.data.batching.published import Published
from trime.data.module import PlannedLoader
from trime.data.segments import cut
from trime.token_memory.train.in_batch import InBatch
from trime.training.language_model import LanguageModel, UpdateSettings
from trime.training.optimizers import NAG, Adam
from trime.training.trainer import quiet

FILES = {model: f"model/{model}/train_trajectory.json" for model in models()}
RUNS = {model: index(file) for model, file in FILES.items() if (ROOT / file).is_file()}
TIMES = 10.0


class Record(pl.Callback):
    """Records the loss sum of every micro-batch, and learning rate and norm of the mean gradient of every update."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        gradients = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        self.norms.append(float(torch.cat(gradients).norm()) / module.targets)
        self.rates.append(optimizer.param_groups[0]["lr"])


def loader(name: str) -> PlannedLoader:
    """Return our loader of the run's batches."""
    words, updates = RUNS[name]["argv"], RUNS[name]["updates"]
    text, special_ids = stream(corpus_of(name), "train")
    length, multiple = int(option(words, "--tokens-per-sample")), int(option(words, "--required-batch-size-multiple", "8"))
    order, size = "kept" if "--keep-order" in words else "shuffled", int(option(words, "--max-tokens")) // length
    batching = Published(size, order, int(option(words, "--seed", "1")), multiple=multiple)
    steps = sum(len(update["batches"]) for update in updates)
    return PlannedLoader(text, cut(text.offsets, length), batching, None, steps, special_ids)


def optimizer_of(words: list[str]) -> Callable[..., torch.optim.Optimizer]:
    """Return a factory of a command's optimiser; it uses the command's --lr, whatever its argument."""
    settings = {"lr": float(option(words, "--lr")), "weight_decay": float(option(words, "--weight-decay"))}
    if option(words, "--optimizer") == "nag":
        momentum = float(option(words, "--momentum", "0.99"))
        return lambda parameters, lr: NAG(parameters, momentum=momentum, **settings)
    betas, eps = literal_eval(option(words, "--adam-betas", "(0.9, 0.999)")), float(option(words, "--adam-eps", "1e-8"))
    return lambda parameters, lr: Adam(parameters, betas=betas, eps=eps, **settings)


def task(name: str) -> LanguageModel:
    """Return the run's objective, optimiser and schedule over its first checkpoint."""
    run, words = RUNS[name], RUNS[name]["argv"]
    joint = run["criterion"] in CRITERIA
    memory = InBatch(CRITERIA[run["criterion"]](), run["cross_sent_ratio"] or 0.0) if joint else None
    training = UpdateSettings(seed=1, padding_is_memory=True)
    net = network(name, "checkpoint_init", published=joint)
    return LanguageModel(net.train(), memory, training, optimizer_of(words), schedule(words))


class Trajectory(NamedTuple):
    """The course of a run: losses of its micro-batches, gradient norms and learning rates of its updates, final weights."""

    losses: torch.Tensor
    norms: torch.Tensor
    rates: list[float]
    weights: dict[str, torch.Tensor]


def train_run(name: str, precision: str, shift: int | None = None) -> Trajectory:
    """Train; with a seed ``shift``, from weights that are one rounding larger or smaller at random."""
    model, record, train, words = task(name), Record(), loader(name), RUNS[name]["argv"]
    if shift is not None:
        torch.manual_seed(shift)
        for weight in model.parameters():
            weight.data *= 1 + torch.finfo(weight.dtype).eps * torch.randn_like(weight).sign()
    with quiet():
        trainer = pl.Trainer(
            max_steps=len(RUNS[name]["updates"]),
            accumulate_grad_batches=int(option(words, "--update-freq", "1")),
            gradient_clip_val=float(option(words, "--clip-norm")) or None,
            precision=precision,
            logger=False,
            callbacks=[record],
            accelerator="cpu",
            limit_val_batches=0,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(model, train)
    weights = {key: weight.detach().double() for key, weight in model.network.named_parameters() if weight.numel()}
    return Trajectory(torch.tensor(record.losses).double(), torch.tensor(record.norms).double(), record.rates, weights)


@parametrized("name", list(RUNS))
def test_run_has_the_published_batches(name: str) -> None:
    run, train = RUNS[name], loader(name)
    planned = [batch for epoch in range(train.steps) for batch in train.batching.plan(train.segments, epoch, None)][
        : train.steps
    ]
    assert planned == [batch for update in run["updates"] for batch in update["batches"]]
    shapes = [[*batch.tokens.shape] for batch in train]
    assert shapes == [shape for update in run["updates"] for shape in update["batch_shapes"]]


@parametrized("name", list(RUNS))
def test_run(name: str) -> None:
    updates = RUNS[name]["updates"]
    exact = train_run(name, "64-true")
    rounded = [train_run(name, "32-true", shift) for shift in (None, 1, 2)]
    losses = torch.tensor([loss for update in updates for loss in update["loss_sum_nats"]]).double()
    norms = torch.tensor([update["log"]["gnorm"] for update in updates]).double()
    assert exact.rates == pytest.approx([update["lr_used"] for update in updates], rel=1e-9)
    assert_near(losses, exact.losses, [one.losses for one in rounded], so_far=True)
    assert_near(norms, exact.norms, [one.norms for one in rounded], so_far=True, printed=5e-4)  # to three places
    last = {key: weight.double() for key, weight in network(name).named_parameters()}
    for key, weight in exact.weights.items():
        assert_near(last[key], weight, [one.weights[key] for one in rounded])


def assert_near(
    published: torch.Tensor, exact: torch.Tensor, rounded: list[torch.Tensor], so_far: bool = False, printed: float = 0.0
) -> None:
    """Compare within the deviation of float32 runs; with ``so_far``, that of a series up to each of its numbers."""
    deviations = torch.stack([(one - exact).abs() for one in rounded]).amax(0)
    deviation = deviations.cummax(0).values if so_far else deviations.max()
    rounding = 4 * torch.finfo(torch.float32).eps * exact.abs()
    assert ((published - exact).abs() <= TIMES * deviation + rounding + printed).all()
