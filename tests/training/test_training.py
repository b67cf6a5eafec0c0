"""Training: the loss is a sum divided once, and interrupted runs resume to the weights of uninterrupted ones."""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import nn

from tests.conftest import ROOT, Tiny
from tests.helpers.training import SHARDED, crash_before, load_weights, train, train_watched
from trime.common import progress
from trime.common.types import Batch
from trime.errors import UserError
from trime.lab.provenance import config_hash
from trime.layers.embeddings import AdaptiveInput
from trime.layers.heads import AdaptiveSoftmax
from trime.models.backbones.transformer import Transformer, TransformerLayer
from trime.models.network import Network
from trime.stages import graph as plan_module
from trime.stages.graph import Graph
from trime.token_memory.train.in_batch import Drawn, InBatch
from trime.token_memory.train.visibility import Local
from trime.training.language_model import LanguageModel, UpdateSettings


def module(memory: InBatch | None) -> LanguageModel:
    torch.manual_seed(0)
    embedding = AdaptiveInput(30, 16, [8])
    backbone = Transformer(embedding, layers=1, heads=2, inner=16, positions=8)
    network = Network(backbone, AdaptiveSoftmax(embedding)).double()
    backbone.position = backbone.position.double()
    return LanguageModel(network, memory, UpdateSettings(), torch.optim.SGD, lambda update: 1.0)


def batch(seed: int, rows: int = 3, short: int = 0) -> Batch:
    torch.manual_seed(seed)
    tokens, targets = torch.randint(30, (rows, 8)), torch.randint(30, (rows, 8))
    length = torch.full((rows,), 8)
    length[-1] -= short
    scored = torch.arange(8) < length[:, None]
    zero = torch.zeros(rows, dtype=torch.long)
    return Batch(tokens, targets, length, scored, zero, torch.arange(rows), zero, zero == 0)


def test_padding_is_neither_scored_nor_memory() -> None:
    model, padded = module(InBatch(Local())), batch(1, short=3)
    tokens, targets = padded.tokens.masked_fill(~padded.scored, 5), padded.targets.masked_fill(~padded.scored, 9)
    changed = padded._replace(tokens=tokens, targets=targets)
    one, other = model.losses(padded, None, False)[0], model.losses(changed, None, False)[0]
    assert len(one) == 21 and torch.equal(one, other)


def test_context_is_memory_but_not_scored() -> None:
    model, whole = module(InBatch(Local())), batch(2)
    scored = whole.scored.clone()
    scored[:, :5] = False
    every, later = model.losses(whole, None, False)[0], model.losses(whole._replace(scored=scored), None, False)[0]
    assert torch.allclose(every.view(3, 8)[:, 5:].flatten(), later)


def test_gradients_are_divided_once_by_the_updates_targets() -> None:
    """Two micro-batches of different sizes give the gradient of one batch with both (without memories)."""
    parts, model = [batch(3, short=5), batch(4)], module(None)
    both = Batch(*(torch.cat(columns) for columns in zip(*(part[:-1] for part in parts), strict=True)))
    for part in parts:
        losses, _ = model.losses(part, None, False)
        model.targets += len(losses)
        losses.sum().backward()
    model.configure_gradient_clipping(None)
    summed = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    other = module(None)
    other.losses(both, None, False)[0].mean().backward()
    together = [p.grad for p in other.parameters() if p.grad is not None]
    assert all(map(torch.allclose, summed, together)) and len(summed) == len(together)


def test_clipping_is_of_the_mean() -> None:
    model = module(None)
    losses, _ = model.losses(batch(5), None, False)
    model.targets = len(losses)
    losses.sum().backward()
    model.configure_gradient_clipping(None, 0.01)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert abs(norm.item() - 0.01) < 1e-6


def test_warm_up_trains_the_plain_model() -> None:
    model, rows = module(InBatch(Local())), batch(6)
    plain, joint = model.losses(rows, None, True)[0], model.losses(rows, None, False)[0]
    assert torch.equal(plain, module(None).losses(rows, None, False)[0]) and not torch.allclose(plain, joint)


def test_an_update_that_sees_no_memory_trains_the_plain_model() -> None:
    drawn, plain = module(Drawn({})), module(None)
    for model in (drawn, plain):
        model.losses(batch(6), 0.5, False)[0].sum().backward()
    pairs = zip(drawn.parameters(), plain.parameters(), strict=True)
    assert all(torch.allclose(one.grad, other.grad, atol=1e-6) for one, other in pairs if one.grad is not None)


def test_shares_change_in_the_course_of_training(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update sees what the shares of its time say; the first one of these four is plain."""
    seen, visibility = [], Drawn.visibility_for

    def noted(self: Drawn, draw: float | None, progress: float = 1.0) -> Any:
        seen.extend([] if draw is None else [progress])
        return visibility(self, draw, progress)

    monkeypatch.setattr(Drawn, "visibility_for", noted)
    train(tiny("experiment=trime_drawn", "train.updates=4", "memory.final={local: 1.0}"))
    assert sorted({*seen}) == [0.25, 0.5, 0.75]


SHORT = (
    *("train.updates=7", "train.checkpoint_every=2", "train.validate_every=3", "train.accumulate=2"),
    "trainer.precision=32-true",  # 16 bits round what the number of processes changes
    "model.backbone.dropout=0.1",
)
ON_CPU = ("dataset.modules=20", "batching.size=5", *SHORT[:-1], "trainer.accelerator=cpu")


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return how far weights lie apart, but for the keys' biases: their gradient is noise, which Adam amplifies."""
    return torch.cat([(one[name] - other[name]).abs().flatten() for name in one if not name.endswith("qkv_proj.bias")])


@pytest.mark.parametrize(
    "experiment",
    ["trime_ext", "srupp_trime_long", *(pytest.param(name, marks=pytest.mark.slow) for name in ("trime_long", "memorizing"))],
)
def test_a_resumed_run_equals_an_uninterrupted_run(
    experiment: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (f"experiment={experiment}", "dataset.modules=20", *SHORT)
    unbroken = train(tiny(*options))
    broken = tiny(*options, f"paths.outputs={tmp_path}", "trainer.enable_progress_bar=true")
    monkeypatch.setattr(progress, "IN_FILE", 0)
    with crash_before(5, monkeypatch):
        train(broken)
    assert not Graph(broken).model.folder.exists()
    capsys.readouterr()
    resumed = train(broken)
    shown = capsys.readouterr().err
    assert "| 4/7 [" in shown and "| 7/7 [" in shown, "the bar begins at the checkpoint and ends with all updates"
    assert resumed.keys() == unbroken.keys()
    assert all(torch.equal(resumed[name], unbroken[name]) for name in unbroken)
    histories = []
    for config in (broken, tiny(*options)):
        with open(Graph(config).model.path() / "metrics.csv", newline="") as file:
            histories.append([{key: row[key] for key in row if key != "tokens_per_second"} for row in csv.DictReader(file)])
    assert histories[0] == histories[1] and not (Graph(broken).model.path() / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["trime_ext", "vanilla", "trime_long", "srupp_trime_long", "memorizing"])
def test_two_processes_train_the_model_of_one(experiment: str, tiny: Tiny, tmp_path: Path) -> None:
    """Memory spans the processes, even where a batch cannot be divided evenly; results are those of one process."""
    options = f"experiment={experiment}", *ON_CPU
    configs = [tiny(*options, f"paths.outputs={tmp_path}/{count}", f"trainer.devices={count}") for count in (1, 2)]
    assert difference(*map(train, configs)).max() < 5e-5
    reports = [json.loads((Graph(config).model.path() / "train.json").read_text()) for config in configs]
    assert [report["devices"] for report in reports] == [1, 2] and reports[0]["tokens"] == reports[1]["tokens"]
    validations = [*map(objectives, configs)]
    assert validations[0] == pytest.approx(validations[1], abs=1e-4) and validations[0]


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "before", "after"), [("memorizing", 2, 1), ("srupp_trime_long", 1, 2)])
def test_training_resumes_with_another_number_of_processes(
    experiment: str, before: int, after: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows' state is redistributed; the model is that of one uninterrupted process."""
    options = (f"experiment={experiment}", "dataset.modules=20", "batching.size=5", *SHORT[:-1], "trainer.accelerator=cpu")
    one = train(tiny(*options, f"paths.outputs={tmp_path}/one"))
    with crash_before(5, monkeypatch):
        train(tiny(*options, f"paths.outputs={tmp_path}/other", f"trainer.devices={before}"))
    other = train(tiny(*options, f"paths.outputs={tmp_path}/other", f"trainer.devices={after}"))
    assert max(float((one[name] - other[name]).abs().max()) for name in one if not name.endswith("qkv_proj.bias")) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "optimizer", "before", "after"),
    [("trime_ext", "fairseq_adam", 2, 1), ("srupp_trime_long", "radam", 1, 2), ("memorizing", "nag", 2, 2)],
)
def test_sharded_training_makes_the_model_of_one_process(
    experiment: str, optimizer: str, before: int, after: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training with FSDP, also where it is resumed with or without it, gives the model of one process."""
    options = (f"experiment={experiment}", f"optimizer={optimizer}", "dataset.modules=20", "batching.size=5", *SHORT[:-1])
    tails = ("model.head.tied_projections=false",) * (experiment == "trime_ext")  # no target may lie in one process's tail
    options = (*options, *tails, "train.clip_norm=0.5", "trainer.accelerator=cpu", "trainer.strategy=fsdp")
    one = train(tiny(*options, f"paths.outputs={tmp_path}/one"))
    monkeypatch.setenv(SHARDED, str(tmp_path / "sharded"))
    monkeypatch.setattr(plan_module, "train_in", train_watched)
    with crash_before(5, monkeypatch):
        train(tiny(*options, f"paths.outputs={tmp_path}/other", f"trainer.devices={before}"))
    other = train(tiny(*options, f"paths.outputs={tmp_path}/other", f"trainer.devices={after}"))
    assert len((tmp_path / "sharded").read_text().split()) == 2 * ((before > 1) + (after > 1)), "of both processes"
    difference = torch.cat([(one[name] - other[name]).abs().flatten() for name in one if not name.endswith("qkv_proj.bias")])
    assert difference.mean() < 1e-7 and difference.max() < 2e-4  # Adam amplifies gradients that are only noise


@pytest.mark.slow
def test_two_machines_train_the_model_of_one(tiny: Tiny, session_folder: Path, tmp_path: Path) -> None:
    """Both run the same command with different NODE_RANK; the first goes on alone."""
    options = ("experiment=trime_ext", "batching.size=5", *SHORT[:-1], "trainer.accelerator=cpu")
    one = train(tiny(*options, f"paths.outputs={tmp_path}/one"))
    two = [f"paths.outputs={tmp_path}/two", "trainer.num_nodes=2", "trainer.devices=1", "datastore.tokens=null"]
    fixed = ["size=tiny", "logger=none", f"paths.data={session_folder}/data"]
    command = [sys.executable, str(ROOT / "cli.py"), *fixed, *options, *two]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    machines = [
        subprocess.Popen(command, env=os.environ | environment | {"NODE_RANK": str(node)}, stdout=subprocess.PIPE, text=True)
        for node in (1, 0)
    ]
    outputs = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert "encode: made" in outputs[1] and "encode: made" not in outputs[0]
    assert "this machine is done" in outputs[0]
    assert difference(one, load_weights(tiny(*options, *two))).max() < 5e-5


def test_a_non_finite_loss_is_an_error_with_advice(tiny: Tiny, tmp_path: Path) -> None:
    diverges = "schedule.peak=1e30", "train.clip_norm=0", "train.updates=20", f"paths.outputs={tmp_path}"
    with pytest.raises(UserError, match=r"schedule\.peak"):
        train(tiny("experiment=vanilla", *diverges))


def test_compiled_layers_train_the_same_model(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is compiled, and a line says where that fails. No compiler is needed: what it makes is replaced."""
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda layer: compiled.append(layer))
    options = "experiment=trime_ext", "dataset.modules=20", *SHORT
    plain = train(tiny(*options))
    same = train(tiny(*options, "trainer.compile=true", f"paths.outputs={tmp_path}"))
    assert compiled and all(isinstance(layer, TransformerLayer) for layer in compiled)
    assert all(torch.equal(same[name], weight) for name, weight in plain.items())
    hashes = [config_hash(tiny(*options, *words)) for words in ((), ("trainer.compile=false",), ("trainer.compile=true",))]
    models = [Graph(tiny(*options, f"trainer.compile={compiles}")).model.name for compiles in ("false", "true")]
    assert hashes[0] == hashes[1] != hashes[2] and models[0] != models[1], "its numbers differ in their last digits"

    def no_compiler(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(nn.Module, "compile", lambda layer: setattr(layer, "_compiled_call_impl", no_compiler))
    with pytest.raises(UserError, match=r"trainer\.compile=true failed at its start .*no compiler"):
        train(tiny(*options, "trainer.compile=true", f"paths.outputs={tmp_path}/broken"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU by a C++ compiler")
@pytest.mark.parametrize("experiment", ["trime_ext", "transformer_xl", "memorizing"])
def test_losses_of_compiled_layers(experiment: str, tmp_path: Path) -> None:
    losses = {}
    for compiles in ("false", "true"):
        words = ["size=tiny", "train.updates=12", "train.log_every=1", "trainer.precision=32-true", "logger=none"]
        words += [f"experiment={experiment}", f"trainer.compile={compiles}", f"paths.outputs={tmp_path}/{compiles}"]
        command = [sys.executable, ROOT / "cli.py", *words, "stages=[prepare,pack,fit]"]
        subprocess.run(command, check=True, capture_output=True, timeout=500)
        (file,) = (tmp_path / compiles / "artefacts").glob("fit-*/metrics.csv")
        losses[compiles] = [float(row["train/loss"]) for row in csv.DictReader(file.open()) if row["train/loss"]]
    assert len(losses["true"]) == 12 and losses["true"] == pytest.approx(losses["false"], abs=1e-5)


def objectives(config: DictConfig) -> dict[int, float]:
    """Return the objective of every validation, by update."""
    with open(Graph(config).model.path() / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["valid/objective"]]
    return {int(row["update"]): float(row["valid/objective"]) for row in rows}


def kept_update(config: DictConfig) -> int:
    """Return the update whose weights the run kept."""
    return json.loads((Graph(config).model.path() / "train.json").read_text())["kept_update"]


GETS_WORSE = (
    *("dataset.modules=20", "train.updates=14", "train.validate_every=4", "train.checkpoint_every=4"),
    "schedule.warmup=0",
)


def test_the_best_weights_are_kept(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rising learning rate makes training diverge, train.keep=best keeps the best weights, also in a killed run."""
    rising = (*GETS_WORSE, "schedule.peak=0.001", "schedule.floor=0.4", "train.clip_norm=0", "experiment=trime")
    best, last = (tiny(*rising, f"train.keep={keep}", f"paths.outputs={tmp_path}/{keep}") for keep in ("best", "last"))
    weights_of = {"best": train(best), "last": train(last)}
    validations = objectives(best)
    assert [*validations] == [4, 8, 12, 14]
    assert kept_update(best) == min(validations, key=lambda update: validations[update]) < 14
    assert [*objectives(last)] == [4, 8, 12] and kept_update(last) == 14
    until = tiny(
        *rising, "train.keep=last", f"train.updates={kept_update(best)}", "schedule.updates=14", f"paths.outputs={tmp_path}"
    )
    for name, weight in train(until).items():
        assert torch.equal(weight, weights_of["best"][name]) and not torch.equal(weight, weights_of["last"][name])
    broken = tiny(*rising, "train.keep=best", f"paths.outputs={tmp_path}/broken")
    for update in (4, 9):  # right after a validation at which a checkpoint was due too, and later
        with crash_before(update, monkeypatch):
            train(broken)
    resumed = train(broken)
    assert all(torch.equal(resumed[name], weight) for name, weight in weights_of["best"].items())
    assert objectives(broken) == validations and kept_update(broken) == kept_update(best)
