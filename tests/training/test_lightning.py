"""Lightning as its users know it: a plain trainer, and callbacks, loggers and arguments of the trainer from settings."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from tests.conftest import ROOT, Tiny
from tests.helpers.training import crash_before, train
from trime.data.batching.policies import Shuffled
from trime.data.datasets.folder import Folder
from trime.data.module import TextDataModule
from trime.data.tokenizers import Bytes, Whitespace
from trime.errors import UserError
from trime.lab.provenance import config_hash
from trime.stages.graph import Graph
from trime.stages.preflight import check
from trime.training.schedules import check_scheduler_state

LR = "+callbacks.lr={_target_: pytorch_lightning.callbacks.LearningRateMonitor}"
CSV = "+logger.lightning.csv={_target_: pytorch_lightning.loggers.CSVLogger, name: null, version: logged}"


class Rates(pl.Callback):
    """Records the learning rate of each update, as its optimiser has it, and as the schedule gives it."""

    seen: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        self.seen.append((rate, module.schedule(trainer.global_step)))


def test_learning_rates_are_the_schedules_to_the_last_bit(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With accumulation, over a whole cosine, and where a killed training resumes."""
    config = tiny(
        *("experiment=vanilla", "dataset.modules=20", "train.updates=9", "train.accumulate=2", "train.checkpoint_every=2"),
        *("schedule.warmup=3", "schedule.floor=1e-5", f"paths.outputs={tmp_path}"),
        f"+callbacks.rates={{_target_: {__name__}.Rates}}",
    )
    Rates.seen.clear()
    with crash_before(5, monkeypatch):
        train(config)
    train(config)
    assert len(Rates.seen) == 5 + 5 and all(used == planned for used, planned in Rates.seen)
    assert Rates.seen[4] == Rates.seen[5] and len({used for used, _ in Rates.seen}) == 9


@pytest.mark.slow
def test_the_page_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of docs/python.md, block after block; what it leaves behind resumes and is found again."""
    page = (ROOT / "docs" / "python.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert names["trainer"].global_step == 20 and (tmp_path / "corpus" / "statistics.json").is_file()
    folder = tmp_path / "logs" / "python"
    rates = [float(row["lr-AdamW"]) for row in logged(folder, "lr-AdamW")]
    assert len(rates) == 20 and max(rates) == 0.003 and logged(folder, "valid/objective")


def logged(folder: Path, column: str) -> list[dict[str, str]]:
    """Return the rows of ``metrics.csv`` that have a value in a column."""
    with open(folder / "metrics.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if row[column]]


def text_module(text_folder: Path, folder: Path) -> TextDataModule:
    return TextDataModule(Folder(str(text_folder), Whitespace()), folder, Shuffled(4, seed=0), length=16)


def test_a_data_module_makes_its_corpus_once(text_folder: Path, tmp_path: Path) -> None:
    data = text_module(text_folder, tmp_path / "corpus")
    data.prepare_data()
    made = (tmp_path / "corpus" / "train.bin").stat().st_mtime_ns
    data.prepare_data()
    data.setup("fit")
    assert (tmp_path / "corpus" / "train.bin").stat().st_mtime_ns == made
    assert sum(int(batch.scored.sum()) for batch in data.train_dataloader()) == data.segments.scored(), "an epoch, no trainer"
    for dataset in (Folder(str(text_folder), Bytes()), Folder(str(text_folder), Whitespace(), ratio=0.2)):
        with pytest.raises(UserError, match="tokenised or split otherwise"):
            TextDataModule(dataset, tmp_path / "corpus", Shuffled(4, seed=0), length=16).prepare_data()
    text_folder = text_folder.rename(text_folder.with_name("moved"))
    text_module(text_folder, tmp_path / "corpus").prepare_data()
    (text_folder / "train" / "0.txt").write_text("another text\n")
    with pytest.raises(UserError, match="another text"):
        text_module(text_folder, tmp_path / "corpus").prepare_data()
    with pytest.raises(UserError, match="not a corpus"):
        text_module(text_folder, text_folder).prepare_data()


def test_callbacks_loggers_and_arguments_come_from_settings(tiny: Tiny, tmp_path: Path) -> None:
    """They reach the trainer; those that may change the model enter its hash, a logger does not."""
    fixed = ("experiment=vanilla", "dataset.modules=20", f"paths.outputs={tmp_path}")
    plain, other = Graph(tiny(*fixed)), Graph(tiny(*fixed, CSV))
    assert plain.fit.fingerprint == other.fit.fingerprint and config_hash(plain.config) == config_hash(other.config)
    config = tiny(*fixed, LR, CSV, "train.log_every=1", "+trainer.extra.limit_val_batches=2")
    others = [tiny(*fixed, word) for word in (LR, "+trainer.extra.limit_val_batches=2", "callbacks=learning_rate")]
    others.append(config)
    hashes = {Graph(one).fit.fingerprint for one in others}
    assert len(hashes) == 3 and plain.fit.fingerprint not in hashes and len(set(map(config_hash, others))) == 3
    assert Graph(tiny(*fixed, LR, "callbacks.lr=null")).fit.fingerprint == plain.fit.fingerprint
    check(config)
    train(config)
    assert logged(Graph(config).run_folder / "logged", "lr-AdamW")


def test_training_may_stop_early(tiny: Tiny, tmp_path: Path) -> None:
    """By a callback of Lightning's; the report has the updates that were made."""
    stop = "{_target_: pytorch_lightning.callbacks.EarlyStopping, monitor: valid/objective, patience: 1, mode: max}"
    config = tiny(
        *("experiment=vanilla", "dataset.modules=20", "train.updates=40", "train.validate_every=2", "train.keep=last"),
        *(f"+callbacks.stop={stop}", f"paths.outputs={tmp_path}"),
    )
    train(config)
    report = json.loads((Graph(config).model.path() / "train.json").read_text())
    assert report["updates"] == report["kept_update"] == 4
    config.train.validate_every = 5  # it stops at another validation
    train(config)
    assert json.loads((Graph(config).model.path() / "train.json").read_text())["updates"] == 10


@pytest.mark.parametrize(
    ("callback", "message"),
    [("EMAWeightAveraging", "needs train.keep=last"), ("StochasticWeightAveraging, swa_lrs: 0.1", "learning rates by epochs")],
)
def test_callbacks_that_would_be_undone_are_refused(callback: str, message: str, tiny: Tiny, tmp_path: Path) -> None:
    added = f"+callbacks.one={{_target_: pytorch_lightning.callbacks.{callback}}}"
    with pytest.raises(UserError, match=message):
        train(tiny("experiment=vanilla", "dataset.modules=20", added, f"paths.outputs={tmp_path}"))


@pytest.mark.parametrize("argument", ["limit_train_batches", pytest.param("overfit_batches", marks=pytest.mark.slow)])
def test_epochs_of_few_batches(argument: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations and checkpoints are by updates all the same, and a killed training resumes to the same weights."""
    options = (
        *("experiment=vanilla", "dataset.modules=20", "train.updates=8", "train.accumulate=2", "train.validate_every=3"),
        *("train.checkpoint_every=2", "train.keep=last", f"+trainer.extra.{argument}=4"),
    )
    whole, broken = (tiny(*options, f"paths.outputs={tmp_path}/{name}") for name in ("whole", "broken"))
    weights = train(whole)
    with crash_before(5, monkeypatch):
        train(broken)
    resumed = train(broken)
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())
    with open(Graph(broken).model.path() / "metrics.csv", newline="") as file:
        validated = [int(row["update"]) for row in csv.DictReader(file) if row["valid/objective"]]
    assert validated == [3, 6]


@pytest.mark.slow
def test_several_processes_log_once(tiny: Tiny, tmp_path: Path) -> None:
    """A callback that needs a logger finds one in every process."""
    devices = ("trainer.devices=2", "trainer.accelerator=cpu", "train.log_every=1", f"paths.outputs={tmp_path}")
    config = tiny("experiment=vanilla", "dataset.modules=20", "trainer.precision=32-true", LR, CSV, *devices)
    train(config)
    assert [row["step"] for row in logged(Graph(config).run_folder / "logged", "lr-AdamW")] == ["0", "1"]


def test_a_checkpoint_without_a_scheduler_is_refused() -> None:
    """Of an older version: its training would start at the first learning rate again."""
    check_scheduler_state({"lr_schedulers": [{}]})
    check_scheduler_state({})  # weights alone
    with pytest.raises(UserError, match="older version"):
        check_scheduler_state({"lr_schedulers": []})
