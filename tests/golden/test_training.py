"""The short runs of the published trainer, from its first checkpoint to its last (README section 2c).

Ours go through the Lightning module, its accumulation, clipping and schedules, over batches that the
published order plans from the text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from tests.golden.published import ROOT, index, network, parametrized
from tests.golden.test_evaluation import stream
from tests.golden.test_losses import visibility
from tests.golden.test_schedules import schedule
from trime.data.batching.published import Published
from trime.data.module import PlannedLoader, TextModule, WindowLoader
from trime.data.segments import cut
from trime.memory.in_batch import InBatch
from trime.optim.adam import Adam
from trime.optim.nag import NAG
from trime.stages.training import quiet
from trime.tasks.language_model import LanguageModel, Training

RUNS = {
    path.parent.name: index(f"model/{path.parent.name}/train_trajectory.json")
    for path in ROOT.glob("model/*/train_trajectory.json")
}


class Record(pl.Callback):
    """Loss sum of every micro-batch; learning rate and norm of the mean gradient of every update."""

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


def option(run: dict, name: str, default: str = "0") -> str:
    words = run["argv"]
    return words[words.index(name) + 1] if name in words else default


def loader(run: dict) -> tuple[PlannedLoader, list[list[int]]]:
    """The run's batches: planned by us from the text's length."""
    corpus = next(word for word in run["argv"] if word.startswith("data/")).split("/")[1]
    length = int(option(run, "--tokens-per-sample"))
    text, ends = stream(corpus, "train")
    segments = cut(text.offsets, length)
    order = "kept" if "--keep-order" in run["argv"] else "shuffled"
    batching = Published(int(option(run, "--max-tokens")) // length, order, int(option(run, "--seed")))
    steps = sum(len(update["batches"]) for update in run["updates"])
    every = [batch for epoch in range(steps) for batch in batching.plan(segments, epoch)][:steps]
    return PlannedLoader(text, segments, batching, None, steps, ends), every


def task(name: str, run: dict) -> LanguageModel:
    own = {"weight_decay": float(option(run, "--weight-decay"))}
    rate, accumulate = schedule(run["argv"]), int(option(run, "--update-freq", "1"))

    def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        first = float(option(run, "--lr"))  # the published optimiser is built with it
        return NAG(parameters, first, 0.99, **own) if "nag" in run["argv"] else Adam(parameters, first, (0.9, 0.98), **own)

    plain = run["criterion"] == "cross_entropy"
    memory = None if plain else InBatch(visibility(run["criterion"]), run["cross_sent_ratio"] or 0.0)
    training = Training(1, 0, accumulate, float(option(run, "--clip-norm")), padding_is_memory=True)
    net = network(name, "checkpoint_init", published=not plain)
    return LanguageModel(net.train(), memory, training, optimizer, rate)


@parametrized("name", sorted(RUNS))
def test_run(name: str, tmp_path: Any) -> None:
    run = RUNS[name]
    model, record, (train, planned) = task(name, run), Record(), loader(run)
    assert planned == [batch for update in run["updates"] for batch in update["batches"]]
    shapes = [[*batch.tokens.shape] for batch in train]
    assert shapes == [shape for update in run["updates"] for shape in update["batch_shapes"]]
    with quiet():
        trainer = pl.Trainer(
            max_steps=len(run["updates"]),
            accumulate_grad_batches=model.training_.accumulate,
            logger=False,
            callbacks=[record],
            accelerator="cpu",
            limit_val_batches=0,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(model, datamodule=TextModule(train, WindowLoader(train.text, train.segments, [[0]], train.ends)))
    assert record.losses == pytest.approx([loss for update in run["updates"] for loss in update["loss_sum_nats"]], rel=1e-5)
    assert record.rates == pytest.approx([update["lr_used"] for update in run["updates"]], rel=1e-9)
    assert record.norms == pytest.approx([update["log"]["gnorm"] for update in run["updates"]], abs=6e-4)  # printed so
    same_weights(model, name)


def same_weights(model: LanguageModel, name: str) -> None:
    """Under Adam the keys' biases have no gradient but rounding noise, which it amplifies: they are left out."""
    last = dict(network(name, "checkpoint_last").named_parameters())
    for key, weight in model.network.named_parameters():
        kept = np.ones(len(weight), bool)
        if key.endswith("attention.inward.bias"):
            kept[len(weight) // 3 : 2 * len(weight) // 3] = False
        assert (weight.detach() - last[key])[kept].abs().max() < 1e-4 if len(weight) else True, key
