"""How a training ends by a signal, what it forecasts, and that several processes have the losses of one."""

from __future__ import annotations

import logging
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import distributed, multiprocessing

from tests.conftest import Tiny
from trime.errors import UserError
from trime.lab.runner import run
from trime.stages.graph import Graph
from trime.token_memory.train.visibility import External, Local, Long, Others
from trime.training.callbacks import MEASURED, WARM_UP, Forecast
from trime.training.trainer import run_training
from trime.training.trime_loss import trime_loss


def interrupted(*_: Any, **__: Any) -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise SystemExit(1)  # noqa: B904  # as Lightning does


ENDS = [(interrupted, KeyboardInterrupt), (Mock(side_effect=SIGTERMException), KeyboardInterrupt)]
ENDS.append((Mock(side_effect=SystemExit(144)), SystemExit))  # of a job that its launcher ends


@pytest.mark.parametrize(("fit", "end"), ENDS)
def test_a_signal_is_an_interrupt_and_a_launcher_may_end_its_job(fit: Any, end: type[BaseException], tmp_path: Path) -> None:
    trainer = Mock(spec=pl.Trainer, precision="32-true", fit=fit)
    trainer.strategy.root_device = torch.device("cpu")
    with pytest.raises(end) as raised:
        run_training("fit", trainer, Mock(spec=pl.LightningModule), None, tmp_path)
    assert end is KeyboardInterrupt or raised.value.code == 144


BEFORE = ["experiment=trime", "stages=[prepare,fit]", "dataset.modules=20"]


def test_a_long_training_is_forecast(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Measured after the plain updates and a warm-up; for the clock an update takes a minute here."""
    clock = iter(range(60, 100_000, 60 * MEASURED))
    monkeypatch.setattr(Forecast, "clock", clock.__next__)
    plain, updates = 2, WARM_UP + MEASURED + 12
    with caplog.at_level(logging.INFO, "trime"):
        run(tiny(*BEFORE, f"train.updates={updates}", f"train.plain_share={plain / updates}", f"paths.outputs={tmp_path}"))
    remaining = updates - plain - WARM_UP - MEASURED
    assert f"{remaining} updates to go, about {remaining} minutes" in caplog.text


def test_checkpoints_must_fit_on_the_disk(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**20, 2**20, 100_000))
    config = tiny(*BEFORE, f"paths.outputs={tmp_path}")
    with pytest.raises(UserError, match=r"checkpoints need up to 1 MiB: free space"):
        run(config)
    assert not Graph(config).fit.folder.exists()


ROWS = [3, 1]  # of each process
VISIBLE = {"local": Local(), "long": Long(), "external": External(), "others": Others()}


def losses(rows: slice) -> dict[str, torch.Tensor]:
    """Return the loss of every target of some rows."""
    draw, count = torch.Generator().manual_seed(0), sum(ROWS)
    g, logits = torch.randn(count, 5, 8, generator=draw), torch.randn(count, 5, 11, generator=draw)
    targets = torch.randint(0, 11, (count, 5), generator=draw)
    given = g[rows], logits[rows], targets[rows]
    return {name: trime_loss(*given, visibility=visible, reduction="none") for name, visible in VISIBLE.items()}


def run_rank(rank: int, folder: str) -> None:
    """Save what one process computes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=len(ROWS))
    torch.save(losses(slice(sum(ROWS[:rank]), sum(ROWS[: rank + 1]))), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_several_processes_have_the_losses_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(run_rank, (str(tmp_path),), nprocs=len(ROWS))
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(ROWS))]
    for name, whole in losses(slice(None)).items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), whole)
